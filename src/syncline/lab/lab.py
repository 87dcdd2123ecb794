"""An emulated cluster on this machine: built, used and removed again."""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from syncline.errors import LabError
from syncline.lab import latency
from syncline.lab.plan import LabPlan, building_batches, choose_network, plan_lab
from syncline.lab.programs import (
    check_congestion,
    check_machine,
    check_packet_filters,
    hold_back,
    interface_bytes,
    queue_drops,
    resent_segments,
    routed_networks,
    run_batch,
    skip_packet_filters,
)
from syncline.lab.queues import DEFAULT_DSCP_BY_PRIORITY, QueueSettings, choose_queues
from syncline.lab.records import LabRecord, clean, create_record, kill_process_groups, remove_lab, write_host_names
from syncline.topology import DirectedLink, Topology
from syncline.variables import process_variables


class LabSettings(TypedDict, total=False):
    """How a lab differs from the usual one; see :class:`Lab`."""

    priorities: bool | Sequence[int]
    queues: str | QueueSettings
    congestion: str | None
    packet_filters: bool


class Lab:
    """A real network on one Linux machine: a namespace for each host, a bridge for each switch, limits on each link.

    Needs root, `ip` and `tc`. Rates are emulated, and latencies and losses of links between hosts (``notes`` says what
    is left out). Use it as a context manager: at the end every process that runs in it is killed, and everything is
    removed::

        with Lab(Topology.load("two-racks-5-3")) as lab:
            process = lab.spawn("h0", ["python", "train.py"])
            process.wait()

    ``priorities=True`` gives every port strict-priority queues for the DSCP values 46, 34, 18 and 8 (a sequence of DSCP
    values, the most urgent first, replaces these). ``queues`` is a kind of ``QUEUE_KINDS``, or what somebody made of
    :class:`QueueSettings`. ``congestion`` (as ``"cubic"``; the machine's, if None) is the congestion control of all
    connections between hosts, but of those that choose another. ``packet_filters=True`` lets bridges ask the packet
    filters for each packet, as on machines with Docker. ``is_kept`` leaves the lab when this process ends, for
    :meth:`attach`. Raises :class:`LabError` for what this machine lacks, and where the lab must be up and is not.

    >>> Lab("two-racks-5-3")
    <Lab two-racks-5-3, down>
    """

    def __init__(
        self,
        topology: Topology | str | Path,
        *,
        priorities: bool | Sequence[int] = False,
        queues: str | QueueSettings = "default",
        congestion: str | None = None,
        packet_filters: bool = False,
        is_kept: bool = False,
    ) -> None:
        self.topology = topology if isinstance(topology, Topology) else Topology.load(topology)
        chosen = choose_queues(queues) if isinstance(queues, str) else queues
        self._queues = _with_priorities(chosen, priorities)
        self._congestion = congestion
        self._has_packet_filters = packet_filters
        self._is_kept = is_kept
        self._record: LabRecord | None = None
        self._plan: LabPlan | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    @classmethod
    def attach(cls, record: LabRecord) -> Lab:
        """Return a lab that exists already."""
        plan = record.plan()
        lab = cls(plan.topology, is_kept=True)
        lab._record, lab._plan = record, plan
        return lab

    @property
    def plan(self) -> LabPlan:
        """What the lab is made of."""
        if self._plan is None:
            raise LabError("the lab is not up; call up(), or use it in a with statement")
        return self._plan

    @property
    def lab_id(self) -> str:
        """The lab's name on this machine."""
        return self.plan.lab_id

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the topology the lab cannot emulate, in sentences for the user."""
        return self.plan.notes()

    def up(self) -> Self:
        """Build the lab; what killed runs left on this machine is removed first."""
        if self._plan is not None:
            raise LabError(f"lab {self.lab_id} is up already; take it down first")
        check_machine()
        if self._congestion is not None:
            check_congestion(self._congestion)
        if self._has_packet_filters:
            check_packet_filters()
        clean()
        network = choose_network(routed_networks())
        record = create_record(
            self.topology,
            network=network,
            is_kept=self._is_kept,
            has_priorities=bool(self._queues.dscp_by_priority),
            congestion=self._congestion,
        )
        try:
            plan = plan_lab(self.topology, lab_id=record.lab_id, network=network, has_taps=latency.is_possible())
            namespaces, *others = building_batches(plan, self._queues, self._congestion)
            run_batch(namespaces)
            hold_back(plan.switch_namespace, plan.tapped_interfaces)
            for batch in others:
                run_batch(batch)
            if not self._has_packet_filters:
                skip_packet_filters(plan.switch_namespace)
            write_host_names(plan)
        except BaseException:
            remove_lab(record)
            raise
        self._record, self._plan = record, plan
        if not self._is_kept:
            atexit.register(self._down_at_exit, os.getpid())
        return self

    def down(self) -> None:
        """Kill what runs in the lab and remove it; nothing happens where it is down already."""
        if self._record is None:
            return
        record, self._record, self._plan = self._record, None, None
        atexit.unregister(self._down_at_exit)
        try:
            kill_process_groups(self._processes)
        finally:
            self._processes.clear()
            remove_lab(record)

    def __enter__(self) -> Self:
        return self if self._plan is not None else self.up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    def spawn(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, in a process group of its own; ``popen`` goes to :class:`subprocess.Popen`.

        The command finds SYNCLINE_TOPOLOGY, SYNCLINE_HOST, SYNCLINE_INTERFACE, GLOO_SOCKET_IFNAME, MASTER_ADDR and
        MASTER_PORT in its environment, and SYNCLINE_CONGESTION where the lab has a congestion control, beside this
        process's own; ``env`` goes before both.
        """
        plan, record = self.plan, self._record
        assert record is not None
        place = plan.host(host)
        here = plan.environment(place, topology_file=str(record.topology_file))
        chosen = {"SYNCLINE_CONGESTION": record.congestion} if record.congestion else {}
        environment = {**process_variables(), **here, **chosen, **(env or {})}
        command = ["ip", "netns", "exec", place.namespace, *argv]
        popen = {"start_new_session": True, **popen}
        process: subprocess.Popen[Any] = subprocess.Popen(command, env=environment, **popen)
        self._processes = [*(known for known in self._processes if known.poll() is None), process]
        return process

    def link_bytes(self) -> dict[DirectedLink, int]:
        """Return the bytes that each direction of each link has carried since the lab was built.

        They are read from the interfaces in the switches' namespace. The kernel hands on up to 64 KiB as one packet and
        counts one set of headers for it, so the figure lies between the payload and what a wire would carry.
        """
        if not self.plan.links:
            return {}
        counted = interface_bytes(self.plan.switch_namespace)
        carried: dict[DirectedLink, int] = {}
        for link in self.plan.links:
            received, sent = counted[link.upper_interface]
            carried[DirectedLink(link.child, "up")] = received
            carried[DirectedLink(link.child, "down")] = sent
        return carried

    def dropped_packets(self) -> dict[DirectedLink, int]:
        """Return how many packets found the queue of each direction of each link full since the lab was built.

        A queue that is a host's own tells TCP of it at once, so that this costs little; what a switch drops is resent.
        """
        switches = queue_drops(self.plan.switch_namespace)
        dropped: dict[DirectedLink, int] = {}
        for link in self.plan.links:
            lower = switches if link.lower_bridge is not None else queue_drops(link.lower_namespace)
            dropped[DirectedLink(link.child, "up")] = lower[link.lower_interface]
            dropped[DirectedLink(link.child, "down")] = switches[link.upper_interface]
        return dropped

    def resent_segments(self) -> int:
        """Return how many TCP segments all hosts together have sent again since the lab was built."""
        return sum(resent_segments(host.namespace) for host in self.plan.hosts)

    def _down_at_exit(self, owner: int) -> None:
        if os.getpid() == owner:  # and not in a process that was forked from it
            self.down()

    def __repr__(self) -> str:
        state = "down" if self._plan is None else f"up as {self._plan.lab_id}"
        return f"<Lab {self.topology.name}, {state}>"


def _with_priorities(settings: QueueSettings, priorities: bool | Sequence[int]) -> QueueSettings:
    if priorities is False:
        return settings
    values = DEFAULT_DSCP_BY_PRIORITY if priorities is True else tuple(priorities)
    return replace(settings, dscp_by_priority=values)
