"""What the steps of ``syncline advise`` take of processors, and how long hosts take for that with the cores they have.

Ranks of one host share its cores, or all ranks those of one machine, and do the same at the same time: they compute and
move gradients, step the optimizer, move parameters. Each kind of work, in core-seconds, takes that over the cores, and
a step no less than all of it together. Links stand idle while what they should carry waits for a core, at its sender
and at its receiver: what moving takes of cores comes on top of what it takes on links. The work is

- of computing, what a rank keeps busy while it computes alone. Where ranks together want more cores than there are,
  what they compute takes longer by that;
- of moving, so much for each byte that a host sends or receives, sums included. What n ranks of one host exchange,
  n - 1 times the data to reduce it and again to gather it, is taken to cost as much, sent and received;
- of codes, what each rank codes; and of the optimizer's step, so much for each byte that a rank owns.

On an accelerator neither computing nor the optimizer's step takes any.

What a byte costs is measured in this process, by all-reduces between a few ranks over loopback and by steps of Adam
(:mod:`syncline.pytorch.model_profile`). Left out are what an emulated network takes of the same cores, caches that
processes take from each other, and what hooks and copies take beside computing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """The cores of each host, or of the one machine that is all of them, and what work takes of one core."""

    num_cores: float = math.inf
    is_one_machine: bool = False
    computing: float = 0.0
    """Cores that a rank keeps busy while it computes alone."""
    moved_s_per_byte: float = 0.0
    """Sent or received."""
    stepped_s_per_byte: float = 0.0
    """Of parameters, by the optimizer."""

    def __str__(self) -> str:
        whose = "all ranks share" if self.is_one_machine else "each host has"
        return f"{whose} {self.num_cores:g} cores (--cores)"

    def busiest_s(self, work_s: Sequence[float]) -> float:
        """Return how long the busiest machine takes, for what the ranks of each host do together."""
        return (math.fsum(work_s) if self.is_one_machine else max(work_s)) / self.num_cores

    def stretch(self, num_ranks: Sequence[int]) -> float:
        """Return how many times longer ranks compute than one does alone; ``num_ranks`` are those of each host."""
        alone_s = min(1.0, self.computing)  # of a second
        return 1 + max(0.0, self.busiest_s([self.computing * count for count in num_ranks]) - alone_s)
