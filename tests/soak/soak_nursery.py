"""Forks the processes of jobs from one that has imported torch, each into its host's network namespace.

It reads orders from its input, a JSON object a line, and says which processes began and which ended, and how. What it
forked dies with it, and it with whoever started it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import selectors
import socket
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from soak_training import batch_of, loss_of, make_model, make_optimizer
from torch.distributed import TCPStore

import syncline
from forked_python import die_with_parent, end_as_python, set_environment, set_streams

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_SLAVE_OF_ALL = 1 << 12, 1 << 19 | 1 << 14


def enter_namespace(name: str) -> None:
    """Move this process, which has one thread still, into a network namespace, with the names that hosts have there.

    It is what `ip netns exec` does; without the names each connection would wait for a name server that is not there.
    """
    with Path("/run/netns", name).open() as place:
        _check(_libc.setns(place.fileno(), _CLONE_NEWNET))
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(None, b"/", None, _MS_SLAVE_OF_ALL, None))
    _check(_libc.mount(f"/etc/netns/{name}/hosts".encode(), b"/etc/hosts", None, _MS_BIND, None))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "this process cannot move into a host of the lab")


def become(order: dict[str, Any]) -> None:
    """Be what is ordered, to the end of the interpreter."""
    enter_namespace(order["namespace"])
    set_environment(order["environment"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    set_streams([nothing, output, output])
    os.close(nothing)
    os.close(output)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_as_python(lambda: import_module(order["program"]).main(order["config"]))


class Nursery:
    """Its input, and the processes that have not ended."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._rest = b""
        self._processes: dict[int, int] = {}

    def serve(self) -> dict[str, Any] | None:
        """Serve until the input ends; in a child, return what it is to be."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._processes:
                    self._tell_end(key.fd)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return None
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    order = self._start(json.loads(line))
                    if order is not None:
                        return order

    def _start(self, orders: list[dict[str, Any]]) -> dict[str, Any] | None:
        begun = {}
        for order in orders:
            process = os.fork()
            if process == 0:
                die_with_parent()
                self._selector.close()
                for handle in self._processes:
                    os.close(handle)
                return order
            handle = os.pidfd_open(process)
            self._processes[handle] = process
            self._selector.register(handle, selectors.EVENT_READ)
            begun[order["name"]] = process
        print(json.dumps({"begun": begun}), flush=True)
        return None

    def _tell_end(self, handle: int) -> None:
        self._selector.unregister(handle)
        process = self._processes.pop(handle)
        os.close(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(json.dumps({"ended": process, "status": status}), flush=True)


def open_a_store() -> None:
    """Let torch open what its first store opens and no later one, so that ranks hold it before they join a job."""
    listening = socket.create_server(("127.0.0.1", 0))
    TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def train_alone() -> None:
    """Import what a rank imports when it trains, whatever its rule, and saves."""
    for rule in (syncline.AllReduce(), syncline.Sharded(), syncline.Overlapped(period=1), syncline.Clustered(period=1)):
        with syncline.init(), tempfile.TemporaryDirectory() as folder:
            model = make_model()
            model, optimizer = syncline.distribute(model, make_optimizer(model), rule, samples="batch")
            loss_of(model, batch_of(0, 0)).backward()
            optimizer.step()
            if rule == syncline.Sharded():
                syncline.save_checkpoint(f"{folder}/last", model, optimizer)


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    train_alone()
    open_a_store()
    import_module("syncline.pytorch.phased")
    for program in ("soak_rank", "soak_proxy", "soak_stranger"):
        import_module(program)
    gc.freeze()  # so that a rank that collects garbage copies only its own
    print(json.dumps({"begun": {}}), flush=True)
    order = Nursery().serve()
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
