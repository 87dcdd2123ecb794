"""Which ports of which hosts can be dialled from which: each host listens on them, and dials those of all others.

It runs on every host at once, before a job. Whoever is dialled answers with what it has found so far, and hears what
the dialler has, so that a host knows in the end also what others found, by whatever way there is. Two that cannot
reach each other learn of one another from a third. Messages bear a code of the job's secret, where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from syncline.endpoints import format_endpoint
from syncline.errors import ConfigurationError

MAX_BYTES = 1 << 20
TRIES = 3
"""Of one port, once its host is known to be there."""
DIAL_S = 2.0
PAUSE_S = 0.3
_HEAD = struct.Struct("!8sI")
_MAGIC = b"SLports1"
_MAC_BYTES = 32


class Outcome(StrEnum):
    """How a dial ended."""

    OPEN = "open"
    REFUSED = "refused"
    """The machine said that nobody listens, or a firewall said so for it."""
    SILENT = "silent"
    """Nothing came back in time."""
    OTHER = "other program"
    """Something accepted that does not speak as we do, or has another secret."""


Found = dict[int, dict[int, Outcome]]
"""By host and port, how one host's dials ended."""


@dataclass(slots=True, kw_only=True)
class PortProbes:
    """What the hosts find of each other, as one of them knows it; ``own`` is its place among ``addresses``."""

    addresses: Sequence[str]
    own: int
    ports: Sequence[int]
    key: bytes = b""
    found: dict[int, Found] = field(default_factory=dict)
    """By the host that dialled."""
    taken: list[int] = field(default_factory=list)
    """Ports of this host that another program has."""
    _heard: set[int] = field(default_factory=set)
    """Hosts that have dialled or answered somebody."""
    _done: set[int] = field(default_factory=set)
    """Hosts that know all."""

    async def run(self, for_s: float) -> None:
        """Probe until all hosts know all of each other, or ``for_s`` have passed."""
        self.found[self.own] = {host: {} for host in self.others}
        servers = [await self._listen(port) for port in self.ports]
        try:
            await asyncio.wait_for(asyncio.gather(*map(self._probe, self.others)), for_s)
        except TimeoutError:
            pass  # what is not known by then is told as that
        finally:
            for server in filter(None, servers):
                server.close()

    @property
    def others(self) -> list[int]:
        """All hosts but this one."""
        return [host for host in range(len(self.addresses)) if host != self.own]

    def is_whole(self, host: int) -> bool:
        """Whether what ``host`` found is known, of all ports of all others."""
        row = self.found.get(host, {})
        return all(len(row.get(other, {})) == len(self.ports) for other in range(len(self.addresses)) if other != host)

    def opens(self, source: int, target: int) -> bool | None:
        """Whether all ports of ``target`` can be dialled from ``source``; None if that is not known."""
        outcomes = self.found.get(source, {}).get(target, {})
        if len(outcomes) < len(self.ports):
            return None
        return all(outcome is Outcome.OPEN for outcome in outcomes.values())

    async def _listen(self, port: int) -> asyncio.Server | None:
        address = self.addresses[self.own]
        try:
            return await asyncio.start_server(self._serve, address, port)
        except OSError as error:
            if port not in self.taken:
                self.taken.append(port)
            if len(self.taken) == len(self.ports):
                raise ConfigurationError(
                    f"cannot listen on {format_endpoint(address, port)}: {os.strerror(error.errno or 0)}; end what "
                    "listens there, or give other --ports"
                ) from error
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            async with asyncio.timeout(DIAL_S):
                self._hear(await self._read(reader))
                writer.write(self._message())
                await writer.drain()
                await reader.read(1)  # until the other end has it
        writer.close()

    async def _probe(self, host: int) -> None:
        """Dial all ports of a host until each is known, and then one that is open until all hosts know all."""
        outcomes = self.found[self.own][host]
        num_tries, is_open = 0, list[int]()
        while len(self._done) < len(self.addresses):
            unknown = [port for port in self.ports if port not in outcomes]
            is_open = [port for port in self.ports if outcomes.get(port) is Outcome.OPEN][:1]
            dialled = unknown or is_open
            ended = dict(zip(dialled, await asyncio.gather(*(self._dial(host, port) for port in dialled)), strict=True))
            num_tries = num_tries + 1 if host in self._heard else 0
            outcomes |= {port: how for port, how in ended.items() if how is Outcome.OPEN or num_tries >= TRIES}
            if all(self.is_whole(each) for each in range(len(self.addresses))):
                self._done.add(self.own)
            await asyncio.sleep(PAUSE_S)
        for port in is_open:  # who cannot dial this host has no other way to hear that all know all
            await self._dial(host, port)
        await asyncio.sleep(2 * PAUSE_S)  # for those that do not know yet that all do

    async def _dial(self, host: int, port: int) -> Outcome:
        try:
            async with asyncio.timeout(DIAL_S):
                reader, writer = await asyncio.open_connection(self.addresses[host], port)
        except ConnectionRefusedError:
            return Outcome.REFUSED
        except OSError:  # TimeoutError is one
            return Outcome.SILENT
        try:
            async with asyncio.timeout(DIAL_S):
                writer.write(self._message())
                self._hear(await self._read(reader))
        except (ValueError, EOFError, OSError):
            return Outcome.OTHER
        finally:
            writer.close()
        return Outcome.OPEN

    # --- messages ---

    def _message(self) -> bytes:
        rows = {
            str(host): {
                str(other): {str(port): outcome.value for port, outcome in ended.items()}
                for other, ended in row.items()
            }
            for host, row in self.found.items()
        }
        about = {"hosts": list(self.addresses), "ports": list(self.ports), "own": self.own, "done": sorted(self._done)}
        body = json.dumps(about | {"found": rows}).encode()
        return _HEAD.pack(_MAGIC, len(body)) + body + self._code(body)

    def _code(self, body: bytes) -> bytes:
        return hmac.digest(b"syncline port probes 1\0" + self.key, body, "sha256")

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        magic, num_bytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if magic != _MAGIC or num_bytes > MAX_BYTES:
            raise ValueError("no probe")
        body = await reader.readexactly(num_bytes)
        if not hmac.compare_digest(await reader.readexactly(_MAC_BYTES), self._code(body)):
            raise ValueError("another secret")
        return body

    def _hear(self, body: bytes) -> None:
        """Take over what another host has found; ValueError if it probes something else."""
        try:
            told = json.loads(body)
            if (told["hosts"], told["ports"]) != (list(self.addresses), list(self.ports)):
                raise ValueError("other hosts or ports")
            host, done = int(told["own"]), {int(each) for each in told["done"]}
            rows = {
                int(source): {
                    int(other): {int(port): Outcome(outcome) for port, outcome in ended.items()}
                    for other, ended in row.items()
                }
                for source, row in told["found"].items()
            }
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("no probe") from error
        if host not in self.others:
            raise ValueError("no host of these")
        self._heard |= {host, *(source for source, row in rows.items() if any(row.values()))}
        self._done |= done
        for source, row in rows.items():
            if source not in self.others:
                continue
            for other, ended in row.items():
                self.found.setdefault(source, {}).setdefault(other, {}).update(ended)
