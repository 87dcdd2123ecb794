"""What labs there are on this machine, and what their links carry now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from syncline.errors import LabError
from syncline.lab.lab import Lab
from syncline.lab.programs import check_machine
from syncline.lab.records import LabRecord, all_records, find_record
from syncline.topology import DirectedLink, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """One direction of a link: its rate, what it carries now, and what it has carried since the lab was built."""

    link: DirectedLink
    limit_bytes_per_s: float
    bytes_per_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LabStatus:
    """One lab. ``owner_pid`` is None where it stays until it is taken down; ``links`` is empty where it is broken."""

    lab_id: str
    topology: Topology
    owner_pid: int | None
    is_abandoned: bool
    has_priorities: bool
    addresses: Mapping[str, str]
    links: tuple[LinkStatus, ...]


def status(*, lab_id: str | None = None, interval_s: float = 1.0) -> tuple[LabStatus, ...]:
    """Describe every lab on this machine, or one; rates are measured over ``interval_s``, of all at once."""
    check_machine()
    records = all_records() if lab_id is None else (find_record(lab_id),)
    labs = [Lab.attach(record) for record in records]
    before, started = [_link_bytes(lab) for lab in labs], time.monotonic()
    time.sleep(interval_s if labs else 0.0)
    after, elapsed_s = [_link_bytes(lab) for lab in labs], time.monotonic() - started
    counts = zip(records, labs, before, after, strict=True)
    return tuple(_describe(record, lab, earlier, later, elapsed_s) for record, lab, earlier, later in counts)


def _link_bytes(lab: Lab) -> dict[DirectedLink, int]:
    try:
        return lab.link_bytes()
    except LabError:
        return {}  # it is being built or removed, or its run was killed in the middle of that


def _describe(
    record: LabRecord,
    lab: Lab,
    earlier: Mapping[DirectedLink, int],
    later: Mapping[DirectedLink, int],
    elapsed_s: float,
) -> LabStatus:
    return LabStatus(
        lab_id=record.lab_id,
        topology=lab.topology,
        owner_pid=record.owner and record.owner[0],
        is_abandoned=record.is_abandoned,
        has_priorities=record.has_priorities,
        addresses={host.name: host.address for host in lab.plan.hosts},
        links=tuple(_link_statuses(lab, earlier, later, elapsed_s)),
    )


def _link_statuses(
    lab: Lab, earlier: Mapping[DirectedLink, int], later: Mapping[DirectedLink, int], elapsed_s: float
) -> Iterator[LinkStatus]:
    limits = {link.child: link.link for link in lab.plan.links}
    for link, num_bytes in later.items():
        yield LinkStatus(
            link=link,
            limit_bytes_per_s=limits[link.child].bytes_per_s(link.direction),
            bytes_per_s=(num_bytes - earlier.get(link, num_bytes)) / elapsed_s,
            num_bytes=num_bytes,
        )
