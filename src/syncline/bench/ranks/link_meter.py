"""What one run of a method puts on the links of the lab; rank 0 reads the counters between barriers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import get_args

import torch.distributed as dist

from syncline.lab import Lab
from syncline.lab.records import find_record
from syncline.topology import DirectedLink, Direction


class LinkMeter:
    """Counts bytes per link, headers included; nothing outside the lab, and on other ranks than 0."""

    def __init__(self, rank: int) -> None:
        lab_id = os.environ.get("SYNCLINE_LAB")
        self._lab = Lab.attach(find_record(lab_id)) if lab_id and rank == 0 else None
        links = () if self._lab is None else self._lab.plan.links
        self._rates = {
            DirectedLink(each.child, way): each.link.bytes_per_s(way) for each in links for way in get_args(Direction)
        }

    def measure(self, run: Callable[[], object]) -> dict[str, int]:
        """Run it once, on all ranks; return what each direction of each link carried for it, the busiest first."""
        dist.barrier()
        before = self._read()
        dist.barrier()
        run()
        dist.barrier()
        after = self._read()
        carried = {link: count - before[link] for link, count in after.items()}
        busiest_first = sorted(carried, key=lambda link: carried[link] / self._rates[link], reverse=True)
        return {f"{link.child} {link.direction}": carried[link] for link in busiest_first}

    def _read(self) -> dict[DirectedLink, int]:
        return {} if self._lab is None else self._lab.link_bytes()
