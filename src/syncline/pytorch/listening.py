"""On which address a rank listens, where nobody says and no master is known: loopback if all ranks share one machine.

The ranks tell each other their machine in a first meeting in the store, by the same rules as in the one that follows:
what an earlier attempt left in the store is not believed.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from syncline.endpoints import own_address
from syncline.errors import ConfigurationError
from syncline.fabric.records import Store
from syncline.fabric.rendezvous import Member, Rendezvous
from syncline.pytorch.environment import Environment, address_of

LOOPBACK = "127.0.0.1"
NO_PORT = 1
"""A meeting wants a port of each rank; in this one nobody listens yet."""


def machine_name() -> str:
    """Return what is equal for two processes exactly if they reach each other over loopback.

    That is the boot of the kernel and the network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = Path("/proc/self/ns/net").readlink()
    return hashlib.sha256(f"{boot} {network}".encode()).hexdigest()[:32]


def share_a_machine(store: Store, *, rank: int, world_size: int, job_id: str, timeout_s: float) -> bool:
    """Whether all ranks run on one machine; all must ask. :class:`RendezvousError` names who does not come."""
    meeting = Rendezvous(store, job_id=f"{job_id} machines")
    own = Member(rank=rank, host=machine_name(), address=LOOPBACK, port=NO_PORT)
    generation = meeting.meet_blocking(own, world_size=world_size, timeout_s=timeout_s)
    return len({member.host for member in generation.members}) == 1


def choose_interface(environment: Environment, store: Store, torch_store: Any) -> Environment:
    """Return ``environment`` with an interface, where nobody says one; all ranks, more than one, must ask.

    ``store`` is where they meet, in a part of ``torch_store``. Raises as the two functions that it consists of.
    """
    together = share_a_machine(
        store,
        rank=environment.rank,
        world_size=environment.world_size,
        job_id=environment.fabric.job_id,
        timeout_s=environment.fabric.connect_s,
    )
    if environment.interface is not None:
        return environment
    return replace(environment, interface=LOOPBACK if together else reachable_address(torch_store))


def reachable_address(torch_store: Any) -> str:
    """Return the address of this machine that the ranks of other machines reach, as far as it can be known.

    That is the one from which it reaches the host that serves the store; of a file, that of the host's own name.
    """
    host = address_of(torch_store) or socket.gethostname()
    address = own_address(host)
    if address is None or ipaddress.ip_address(address).is_loopback:
        raise ConfigurationError(
            f"The ranks run on several machines, and the one way to them that is known here, {host!r}, is this "
            "machine's loopback; give each rank init(interface=), BackendOptions(interface=) or SYNCLINE_INTERFACE: "
            "the address that the other ranks reach"
        )
    return address
