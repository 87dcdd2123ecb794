"""A job that was given no secret, and another user of its machine who does what can be done to it.

    other_user.py FOLDER stranger|impostor

Ranks of the job have RANK 0 and above, and the other user the highest. Everything that it needs is imported before it
becomes another user, which may not read the interpreter's files.
"""

from __future__ import annotations

import asyncio
import encodings.idna
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import syncline
from syncline.errors import HandshakeError, SynclineError
from syncline.fabric import FabricOptions
from syncline.fabric.handshake import FINISH_BYTES, REPLY_BYTES, Dialer
from syncline.fabric.shared_host import read_memory
from syncline.pytorch import connecting
from syncline.pytorch.secret import user_secret
from syncline.runtime.joining.connection import JoinConnection, dial_member, join_terms

OTHER_USER = 65534
DEADLINE_S = 60
KNOCKS = 3
"""How many connections the stranger has refused: one with no secret, one with its own, one in another's words."""


def be_another_user() -> None:
    """Give up every right of this process for good."""
    os.setgroups([])
    os.setresgid(OTHER_USER, OTHER_USER, OTHER_USER)
    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)


def train(folder: Path, rank: int) -> dict[str, Any]:
    """Be a rank of an elastic job: a step, then a pause in which the stranger comes, then another one."""
    with syncline.init(rank=rank, world_size=2, join_port=0) as fleet:
        model = nn.Linear(2, 1)
        model, optimizer = syncline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), syncline.AllReduce(), elastic=True
        )
        pause = os.open(folder / f"pause-{rank}", os.O_RDWR)  # a pipe, which keeps what is written into it
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                (folder / f"told-{rank}").write_text(json.dumps(tell(fleet)))
                os.read(pause, 1)  # until the stranger has done all that it can
        objects = fleet.all_gather_object(f"of rank {rank}")
        assert fleet.growth is not None
        server = fleet.growth._service._server
        return {"objects": objects, "world_size": fleet.world_size, "refused": server._acceptor.num_refused}


def tell(fleet: syncline.Fleet) -> dict[str, Any]:
    """Say what the stranger could find out by itself with patience: processes, ports, names of files."""
    own = psutil.Process()
    ports = [each.laddr.port for each in own.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return {"pid": own.pid, "ports": ports, "join": fleet.join_address, "address": id(fleet)}


def attack(folder: Path) -> dict[str, Any]:
    """Try everything as another user; say how each thing ended."""
    told = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(2)]
    own_secret = user_secret(os.environ)
    be_another_user()
    first = told[0]
    join = (first["join"].rpartition(":")[0], int(first["join"].rpartition(":")[2]))
    secrets = Path(os.environ["TMPDIR"], "syncline-0")
    ends = {
        "its ports are seen": {port for one in told for port in one["ports"]} <= listening_ports(),
        "its secret": attempt((secrets / "secret").read_bytes),
        "its folder": attempt(lambda: list(secrets.iterdir())),
        "another file there": attempt(lambda: (secrets / "mine").write_text("")),
        "another folder's name": attempt(lambda: secrets.rename(secrets.with_name("old"))),
        "its memory": attempt(lambda: read_memory(first["pid"], first["address"], memoryview(bytearray(8)))),
        "its files": attempt(lambda: os.listdir(f"/proc/{first['pid']}/fd")),  # noqa: PTH208
        "its segment": attempt(
            lambda: [os.open(f"/proc/{first['pid']}/fd/{number}", os.O_RDWR) for number in range(64)]
        ),
        "names in /dev/shm": [name for name in os.listdir("/dev/shm") if "syncline" in name],  # noqa: PTH208
        "no secret": attempt(lambda: ask_to_join(join, None)),
        "another secret": attempt(lambda: ask_to_join(join, b"x" * 32)),
        "its words": attempt(lambda: say_the_same_again(join)),
    }
    assert own_secret not in json.dumps(ends).encode()
    return ends


def impersonate() -> dict[str, Any]:
    """Come as rank 1, once as who knows what is in the store and no more: as this program was before it had secrets."""
    user_secret(os.environ)
    be_another_user()
    connecting.user_secret = lambda _: None  # type: ignore[assignment]
    try:
        with syncline.init(rank=1, world_size=2, connect_timeout_s=20) as fleet:
            return {"came in": fleet.all_gather_object("of a stranger")}
    except SynclineError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def serve() -> dict[str, Any]:
    """Be rank 0 of a job whose rank 1 does not come."""
    try:
        with syncline.init(rank=0, world_size=2, connect_timeout_s=20) as fleet:
            return {"let in": fleet.all_gather_object("of rank 0")}
    except HandshakeError as error:
        return {"refused": str(error)}


def attempt(action: Callable[[], Any]) -> str:
    """Return how ``action`` fails; what it returns if it does not."""
    try:
        return f"{action()!r}"
    except (OSError, EOFError, SynclineError) as error:
        return f"{type(error).__name__}: {error}"


def ask_to_join(address: tuple[str, int], secret: bytes | None) -> JoinConnection:
    """Come in as a newcomer does."""
    options = FabricOptions(secret=secret, connect_s=10.0)
    return asyncio.run(dial_member([address], options, own_address="127.0.0.1", timeout_s=10.0))


def say_the_same_again(address: tuple[str, int]) -> bytes:
    """Answer a member by its own words."""
    terms = join_terms(FabricOptions(insecure=True), is_member=False)
    with socket.create_connection(address, timeout=10.0) as sock:
        sock.sendall(Dialer(terms, peer=0, connection_class=0).hello)
        reply = sock.recv(REPLY_BYTES, socket.MSG_WAITALL)
        sock.sendall(reply[:12] + bytes(FINISH_BYTES - 44) + reply[-32:])
        return sock.recv(1)  # nothing: it is closed


def listening_ports() -> set[int]:
    """Return the ports of root's that accept connections, as every user sees them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[7] == "0"}


def main() -> None:
    """Play the part that the rank's number names."""
    assert encodings.idna, "host names are encoded by it"
    signal.alarm(DEADLINE_S)  # a part that waits for one that failed ends
    folder, plan, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    if plan == "impostor":
        result = impersonate() if rank else serve()
    elif rank < 2:
        result = train(folder, rank)
    else:
        pauses = [os.open(folder / f"pause-{each}", os.O_RDWR) for each in range(2)]
        result = attack(folder)
        for each in pauses:
            os.write(each, b".")
    print("told", json.dumps(result))


if __name__ == "__main__":
    main()
