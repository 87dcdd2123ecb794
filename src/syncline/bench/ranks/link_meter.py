"""What one run of a method puts on the links of the lab; rank 0 reads the counters between barriers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

import torch.distributed as dist

from syncline.lab import Lab
from syncline.lab.records import find_record
from syncline.topology import DirectedLink, Direction
from syncline.variables import process_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What one run put on the links, headers included."""

    link_bytes: Mapping[str, int]
    """Each direction of each link, the one that was kept busy longest first."""
    sent_bytes: int
    """What all hosts together sent."""
    num_dropped: int = 0
    """Packets that found a queue full."""
    num_resent: int = 0
    """TCP segments that were sent again."""

    def per_step(self, num_steps: int) -> Carried:
        """Divide what ``num_steps`` steps in a row carried; what was lost is left whole."""
        shares = {link: num_bytes // num_steps for link, num_bytes in self.link_bytes.items()}
        return replace(self, link_bytes=shares, sent_bytes=self.sent_bytes // num_steps)


class LinkMeter:
    """Counts bytes per link, headers included; nothing outside the lab, and on other ranks than 0."""

    def __init__(self, rank: int) -> None:
        lab_id = process_variables().get("SYNCLINE_LAB")
        self._lab = Lab.attach(find_record(lab_id)) if lab_id and rank == 0 else None
        links = () if self._lab is None else self._lab.plan.links
        self._host_links = {DirectedLink(each.child, "up") for each in links if each.lower_bridge is None}
        self._rates = {
            DirectedLink(each.child, way): each.link.bytes_per_s(way) for each in links for way in get_args(Direction)
        }

    def measure(self, run: Callable[[], object]) -> Carried:
        """Run it once, on all ranks; return what the links carried for it."""
        dist.barrier()
        before, lost_before = self._read(), self._count_lost()
        dist.barrier()
        run()
        dist.barrier()
        after, lost = self._read(), self._count_lost()
        carried = {link: count - before[link] for link, count in after.items()}
        busiest_first = sorted(carried, key=lambda link: carried[link] / self._rates[link], reverse=True)
        return Carried(
            link_bytes={f"{link.child} {link.direction}": carried[link] for link in busiest_first},
            sent_bytes=sum(count for link, count in carried.items() if link in self._host_links),
            num_dropped=lost[0] - lost_before[0],
            num_resent=lost[1] - lost_before[1],
        )

    def _read(self) -> dict[DirectedLink, int]:
        return {} if self._lab is None else self._lab.link_bytes()

    def _count_lost(self) -> tuple[int, int]:
        if self._lab is None:
            return 0, 0
        return sum(self._lab.dropped_packets().values()), self._lab.resent_segments()
