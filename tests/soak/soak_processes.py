"""The processes of one job: its ranks on their hosts, those that come for one that is lost, proxies and strangers."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak_forker import START_S, Forker
from soak_growth import Growth
from soak_kinds import SILENCE_S, STALL_S
from soak_network import SoakNetwork, host_of, topology_text
from soak_plan import CHECKPOINT_EVERY, TOLERANT
from soak_record import JobRecord

from rank_scripts import script_environment

PATIENT_SILENCE_S = 30.0
TIMEOUT_S = 20.0
START_TIMEOUT_S = 8.0
MASTER_PORT = 29500


class Processes:
    """All of one job; a rank's number is its place at the start, and who comes later has the next one."""

    def __init__(self, record: JobRecord, network: SoakNetwork, forker: Forker, folder: Path) -> None:
        self._plan, self._record = record.plan, record
        self._network, self._forker, self._folder = network, forker, folder
        self._secret = secrets.token_hex(32)
        self._others: list[int] = []
        self._proxies: dict[int, dict[str, Any]] = {}
        self.names = [host_of(rank, self._plan.world_size) for rank in range(self._plan.world_size)]
        """The host at each place."""
        self.pids: dict[int, int] = {}
        self.growth = Growth(self._plan.world_size)
        (folder / "net.yaml").write_text(topology_text(self._plan.world_size))

    @property
    def living(self) -> list[int]:
        """The ranks whose process has not ended."""
        return [rank for rank, pid in self.pids.items() if pid not in self._forker.ended]

    def start_ranks(self) -> None:
        """Let all ranks begin."""
        begun = self._forker.start([self._order(rank, rank) for rank in self.growth.on])
        self.pids = {rank: begun[str(rank)] for rank in self.growth.on}

    def start_newcomers(self) -> None:
        """Let another rank begin wherever one was lost."""
        ended = self.pids.keys() - {*self.living}
        for place in self.growth.vacant(ended):
            rank = len(self.pids)
            addresses = self.growth.addresses(ended)
            self.growth.on[place] = rank
            self._record.newcomers[rank] = time.monotonic()
            self.pids |= {rank: self._forker.start([self._order(rank, place, addresses)])[str(rank)]}

    def start_proxy(self, rank: int, hear: Callable[[float], object]) -> None:
        """Let a proxy begin before a rank's port; ``hear`` waits for what it tells."""
        control = str(self._folder / f"proxy-{rank}")
        config = {"rank": rank, "address": self._network.address(self.names[rank]), "control": control}
        self._start_other(f"proxy-{rank}", "soak_proxy", self.names[rank], config)
        deadline_s = time.monotonic() + START_S
        while not (heard := self._record.of(rank, "proxy")):
            assert time.monotonic() < deadline_s, "the proxy does not begin"
            hear(1.0)
        self._proxies[rank] = {"rank": rank, "control": control, "port": heard[0]["port"]}

    def control_of(self, rank: int) -> str:
        """Return where the proxy before a rank takes orders."""
        control: str = self._proxies[rank]["control"]
        return control

    def send_stranger(self, host: str, other: str) -> None:
        """Let a stranger on ``other`` knock at a host's ports."""
        places = self._network.listeners(host)
        self._start_other(f"stranger-{len(self._others)}", "soak_stranger", other, {"places": places})

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank that has not ended."""
        if self.pids[rank] not in self._forker.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def end(self, hear: Callable[[float], object]) -> None:
        """Kill whatever lives still, and take note of how all ranks ended."""
        everyone = (*self.pids.values(), *self._others)
        for pid in everyone:
            if pid not in self._forker.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + START_S
        while any(pid not in self._forker.ended for pid in everyone):
            assert time.monotonic() < deadline_s, "processes do not end when they are killed"
            hear(1.0)
        while hear(0.0):
            pass
        self._record.statuses = {rank: self._forker.ended[pid] for rank, pid in self.pids.items()}
        for rank in self.pids:
            output = self._folder / f"output-{rank}"  # which a rank that was killed at once has not made
            self._record.outputs[rank] = output.read_text(errors="replace")[-4000:] if output.exists() else ""

    def _order(self, rank: int, place: int, join: str = "") -> dict[str, Any]:
        plan, name = self._plan, self.names[place]
        kinds = {fault.kind for fault in plan.faults}
        limits = {fault.kind for fault in plan.faults if fault.victim == place}
        environment = script_environment() | {
            "SYNCLINE_HOST": name,
            "SYNCLINE_INTERFACE": self._network.address(name),
            "SYNCLINE_SECRET": self._secret if "wrong-secret" not in limits else secrets.token_hex(32),
            "SYNCLINE_SILENCE": str(SILENCE_S if plan.has_silence else PATIENT_SILENCE_S),
            "SYNCLINE_STALL": str(STALL_S if "hung" in kinds else TIMEOUT_S),
            "SYNCLINE_TIMEOUT": str(TIMEOUT_S),
            "SYNCLINE_CONNECT_TIMEOUT": str(START_TIMEOUT_S if plan.begins_badly else TIMEOUT_S),
            "TMPDIR": str(self._folder / "tmp"),
        }
        environment |= {"SYNCLINE_JOIN": join} if join else self._meeting(rank)
        config = {
            "rank": rank,
            "place": place,
            "plan": plan.as_record() | {"has_periods": plan.rule in TOLERANT, "saves": plan.saves},
            "folder": str(self._folder),
            "events": str(self._folder / "events"),
            "checkpoint_every": CHECKPOINT_EVERY,
            "proxy": self._proxies.get(rank),
            "few_files": "few-files" in limits,
        }
        return self._order_of(str(rank), "soak_rank", name, config, environment)

    def _meeting(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._plan.world_size),
            "MASTER_ADDR": self._network.address(self.names[0]),
            "MASTER_PORT": str(MASTER_PORT),
            "SYNCLINE_TOPOLOGY": str(self._folder / "net.yaml"),
        }

    def _order_of(
        self, name: str, program: str, host: str, config: dict[str, Any], environment: dict[str, str]
    ) -> dict[str, Any]:
        return {
            "name": name,
            "program": program,
            "namespace": self._network.namespace(host),
            "environment": environment,
            "output": str(self._folder / f"output-{name}"),
            "config": config,
        }

    def _start_other(self, name: str, program: str, host: str, config: dict[str, Any]) -> None:
        shared = {"events": str(self._folder / "events"), "seed": self._plan.seed}
        order = self._order_of(name, program, host, shared | config, script_environment())
        self._others.append(self._forker.start([order])[name])
