"""Forks Python programs from one process that has imported torch already: ``rank_nursery.py FOLDER MODULE ...``.

Whoever wants one connects to the socket in FOLDER, sends what :func:`forked_client.send` sends, and reads how it ended;
a byte that it sends meanwhile is a signal, and if it goes away the program is killed.
"""

from __future__ import annotations

import array
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

import syncline
from forked_client import NAMESPACES
from forked_python import (
    ForkingPopen,
    die_with_parent,
    end_as_python,
    enter_namespaces,
    run_python,
    set_environment,
    set_streams,
)
from syncline.cli import run

MOST_FILES = 3 + len(NAMESPACES)


def warm_up() -> None:
    """Import what torch and we import when it is first used; leave torch's generator as it is at the start."""
    assert run is not None
    torch.set_num_threads(1)
    untouched = torch.get_rng_state()
    with syncline.init(), tempfile.TemporaryDirectory() as folder:
        model = torch.nn.Linear(2, 2)
        model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        syncline.save_checkpoint(f"{folder}/last", model, optimizer)
    torch.set_rng_state(untouched)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run, and the files that came with it."""

    program: dict[str, Any]
    files: list[int]

    def become(self) -> None:
        """Be the program, to its end."""
        if self.program["has_namespaces"]:
            enter_namespaces(self.files[3:])
        set_streams(self.files[:3])
        for file in self.files:
            os.close(file)
        set_environment(self.program["environment"])
        os.chdir(self.program["folder"])
        if self.program["forks"]:
            subprocess.Popen = ForkingPopen  # type: ignore[misc]
        if self.program["finalizes"]:
            run_python(self.program["arguments"])
        else:
            end_as_python(lambda: run_python(self.program["arguments"]))


class Nursery:
    """The socket, and for each program that runs its process and the connection of whoever wants it."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._programs: dict[int, tuple[int, socket.socket]] = {}
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._has_ended = False

    def serve(self) -> Request | None:
        """Serve until standard input ends; in a child, return what it is to be."""
        while not self._has_ended:
            for key, _ in self._selector.select():
                request = key.data()
                if request is not None:
                    return request
        return None

    def _end(self) -> None:
        self._has_ended = not os.read(0, 1)

    def _accept(self) -> Request | None:
        connection, _ = self._listener.accept()
        request = _read(connection)
        process = os.fork()
        if process == 0:
            die_with_parent()
            os.setsid()
            self._close()
            os.close(connection.detach())
            return request
        for file in request.files:
            os.close(file)
        handle = os.pidfd_open(process)
        self._programs[handle] = process, connection
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._tell_end(handle))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._signal(handle))
        return None

    def _signal(self, handle: int) -> None:
        """Pass on a signal; whoever went away wants no program any more."""
        if handle not in self._programs:
            return
        process, connection = self._programs[handle]
        told = connection.recv(1)
        if not told:
            self._selector.unregister(connection)
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, told[0])

    def _tell_end(self, handle: int) -> None:
        process, connection = self._programs.pop(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self._selector.unregister(handle)
        os.close(handle)
        with suppress(KeyError):
            self._selector.unregister(connection)
        with suppress(OSError):
            connection.send(str(status).encode())
        connection.close()

    def _close(self) -> None:
        """Leave the parent's files to it, so that no object closes a number that is another file's by then."""
        self._selector.close()
        os.close(self._listener.detach())
        for handle, (_, connection) in self._programs.items():
            os.close(handle)
            os.close(connection.detach())


def _read(connection: socket.socket) -> Request:
    files = array.array("i")
    size, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(MOST_FILES * files.itemsize))
    for _, _, data in rights:
        files.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 16)
    return Request(json.loads(text), files.tolist())


def main() -> None:
    """Serve until nobody asks any more."""
    folder, *modules = sys.argv[1:]
    warm_up()
    for name in modules:
        import_module(name)
    gc.freeze()  # so that a program that collects garbage copies only its own
    nursery = Nursery(f"{folder}/socket")
    print("ready", flush=True)
    request = nursery.serve()
    if request is not None:
        request.become()


if __name__ == "__main__":
    main()
