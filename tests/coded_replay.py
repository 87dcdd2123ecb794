"""What sites make of gradients that cross between them in codes: a replay in one process, from its description."""

from __future__ import annotations

from itertools import pairwise

import torch

import reference_codec
from syncline.topology import Topology
from syncline.updates.compression import cells_of, choose_sites

TWO_AND_THREE = Topology.parse(
    """
topology: two-racks-2-3
switch: core
children:
  - {switch: rack-a, uplink: 20 Mbit/s, children: [{host: "a[1-2]", uplink: 1 Gbit/s}]}
  - {switch: rack-b, uplink: 30 Mbit/s, children: [{host: "b[1-3]", uplink: 1 Gbit/s}]}
"""
)
COUNT = 1100


def gradient_of(rank: int, step: int, num_ranks: int, count: int = COUNT) -> torch.Tensor:
    """Integers times the number of ranks: their sums and means are exact in any order."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return num_ranks * torch.randint(-1000, 1000, (count,), generator=generator).float()


class Replay:
    """What the sites make of numbers, in one process, call after call."""

    def __init__(self, topology: Topology, bits: int, count: int = COUNT) -> None:
        self.num_ranks, self.bits, self.count = topology.num_ranks, bits, count
        self.sites, _ = choose_sites(topology, 4 << 20, bits)
        cuts = [count * k // self.num_ranks for k in range(self.num_ranks + 1)]
        self.cells = cells_of([(*pair, rank) for rank, pair in enumerate(pairwise(cuts))], self.sites)
        self.errors: dict[tuple[int, int], torch.Tensor] = {}

    def coded(self, cell: int, site: int, values: torch.Tensor) -> torch.Tensor:
        error = self.errors.get((cell, site), torch.zeros_like(values))
        codes, self.errors[cell, site] = reference_codec.encode(self.bits, values, error)
        return reference_codec.decode(self.bits, codes, len(values))

    def sums(self, brought: list[torch.Tensor], *, is_whole: bool = True) -> torch.Tensor:
        """Return what owners have, or, ``is_whole``, what all ranks take."""
        result = torch.empty(self.count)
        for number, cell in enumerate(self.cells):
            sums = [sum(brought[rank][cell.start : cell.stop] for rank in ranks) for ranks in self.sites]
            home = next(site for site, ranks in enumerate(self.sites) if cell.owner in ranks)
            total = sums[home].clone()
            for site, value in enumerate(sums):
                if site != home:
                    total += self.coded(number, site, value)
            result[cell.start : cell.stop] = self.coded(number, home, total) if is_whole else total
        return result

    def mean(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self.sums([gradient / self.num_ranks for gradient in gradients])
