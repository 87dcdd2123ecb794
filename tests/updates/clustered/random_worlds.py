"""Worlds of the clustered protocol with random clusters, record schedules and proposals."""

import random
from collections.abc import Sequence

from cluster_world import World

from syncline.updates.clustered.messages import RecordSchedule


def random_world(choose: random.Random, *, quorum: float = 0.0, sizes: Sequence[int] = ()) -> World:
    """Make a world; ``sizes`` are those of the clusters, where they are not to be chosen too."""
    sizes = sizes or [choose.randint(1, 4) for _ in range(choose.randint(1, 4))]
    num_clusters = len(sizes)
    ranks = list(range(sum(sizes)))
    choose.shuffle(ranks)
    clusters = [tuple(sorted(ranks.pop() for _ in range(size))) for size in sizes]
    record_schedule = RecordSchedule(
        period=choose.randint(1, 3),
        reelect_every=choose.randint(1, 3),
        has_outer_rounds=num_clusters > 1 or choose.random() < 0.5,
        averages=num_clusters > 1 and choose.random() < 0.5,
    )
    num_records = choose.randint(3, 14)
    return World(
        clusters,
        record_schedule,
        num_records=num_records,
        quorum=quorum,
        propose=Proposer(choose.randrange(1 << 30), clusters) if record_schedule.averages else None,
    )


class Proposer:
    """Proposes other clusters, of the same ranks, for each rank and term; now and then to keep those that there are."""

    def __init__(self, seed: int, clusters: Sequence[Sequence[int]]) -> None:
        self._seed = seed
        self._ranks = [rank for ranks in clusters for rank in ranks]

    def __call__(self, rank: int, term: int) -> tuple[tuple[int, ...], ...]:
        choose = random.Random(f"{self._seed}/{rank}/{term}")
        if choose.random() < 0.2:
            return ()
        num_clusters = choose.randint(1, min(4, len(self._ranks)))
        ranks = choose.sample(self._ranks, len(self._ranks))
        clusters = [[first] for first in ranks[:num_clusters]]
        for other in ranks[num_clusters:]:
            choose.choice(clusters).append(other)
        return tuple(tuple(sorted(ranks)) for ranks in clusters)
