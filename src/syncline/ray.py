"""Ray Train: with ``TopologyConfig``, ``syncline.init()`` works in each worker of a ``TorchTrainer``.

    from syncline.ray import TopologyConfig

    trainer = TorchTrainer(train, torch_config=TopologyConfig(topology="cluster.yaml"), scaling_config=...)

Ray numbers its workers as it places them, and makes torch's process group before ``train`` begins; ``init()`` meets at
the store of that group. The file of the topology need be on the machine of the trainer alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train.torch import TorchConfig

from syncline.errors import ConfigurationError
from syncline.pytorch.fleet import current_fleet
from syncline.topology import Topology

_SECRET_BYTES = 32


@dataclass
class TopologyConfig(TorchConfig):  # type: ignore[misc]  # Ray is not there when types are checked
    """Ray's ``TorchConfig`` (its settings hold here too) with what ``syncline.init()`` needs in each worker.

    ``topology``: a :class:`Topology`, a file, or the name of a shipped one; it has as many ranks as there are workers.
    Default: one switch for all. ``hosts`` says which host of the topology a machine is, by its address in Ray, where
    machines are not named as the topology's hosts are. ``secret``: at least 32 bytes; default: one of each run's own.
    It travels on Ray's connections, which are encrypted only if Ray's TLS is on.

    Raises :class:`TopologyError` at once if the file is wrong; in the run, :class:`ConfigurationError` if ``hosts``
    leaves out a machine.
    """

    topology: Topology | str | Path | None = None
    hosts: Mapping[str, str] | None = None
    secret: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.topology, str | Path):
            self.topology = Topology.load(self.topology)

    @property
    def backend_cls(self) -> type:
        """What Ray calls as it starts and ends the workers."""
        return _TopologyBackend

    def to_dict(self) -> dict[str, Any]:
        """Return what Ray shows of the settings; the secret is left out."""
        name = self.topology.name if isinstance(self.topology, Topology) else None
        return {**super().to_dict(), "topology": name}


class _TopologyBackend(TorchConfig().backend_cls):  # type: ignore[misc]  # as above
    """Tells the workers what they need before torch's process group is made, and closes what they left open."""

    def on_start(self, worker_group: Any, backend_config: TopologyConfig) -> None:
        """Set the variables that ``init()`` reads."""
        text = backend_config.topology.to_yaml() if isinstance(backend_config.topology, Topology) else None
        secret = backend_config.secret or secrets.token_hex(_SECRET_BYTES)
        addresses = worker_group.execute(ray.util.get_node_ip_address)
        told = [
            worker_group.execute_single_async(rank, _tell, text, host, secret)
            for rank, host in enumerate(name_hosts(addresses, backend_config.hosts))
        ]
        ray.get(told)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: TopologyConfig) -> None:
        """Close the fleet of each worker while the others are still there."""
        try:
            worker_group.execute(_close_fleet)
        finally:
            super().on_shutdown(worker_group, backend_config)


def name_hosts(addresses: list[str], hosts: Mapping[str, str] | None) -> list[str | None]:
    """Return the topology's host of each worker; None: the name of its machine counts."""
    if hosts is None:
        return [None] * len(addresses)
    for rank, address in enumerate(addresses):
        if address not in hosts:
            raise ConfigurationError(
                f"TopologyConfig(hosts=) must name the host of every machine, but rank {rank} is at {address!r}, and "
                f"it names {', '.join(sorted(hosts))}"
            )
    return [hosts[address] for address in addresses]


def _tell(text: str | None, host: str | None, secret: str) -> None:
    """Set this worker's variables; the topology is in a file of its memory, so that nothing is left behind."""
    os.environ["SYNCLINE_SECRET"] = secret
    if host is not None:
        os.environ["SYNCLINE_HOST"] = host
    if text is not None:
        file = os.memfd_create("topology.yaml")
        os.write(file, text.encode())
        os.environ["SYNCLINE_TOPOLOGY"] = f"/proc/{os.getpid()}/fd/{file}"


def _close_fleet() -> None:
    with contextlib.suppress(ConfigurationError):  # closed already, or never opened
        current_fleet().close()
