"""With ``Sharded``, ``step()`` returns before the parameters are gathered, and each module waits for its own alone.

Rank 1 holds back its part of each bucket's all-gather until rank 0 lets it go. So what rank 0 gets done before that
cannot have waited for it: otherwise the two would wait for each other until a deadline. Events count, not seconds.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.updates import Sharded
from syncline.updates.bucket import Bucket

NUM_LAYERS = 4
WIDTH = 16
DEADLINE_S = 60.0


@dataclass(slots=True)
class _Gates:
    """For each bucket, whether rank 1 may gather it; and what happened, as rank 0 saw it."""

    events: list[threading.Event] = field(default_factory=lambda: [threading.Event() for _ in range(NUM_LAYERS)])
    log: list[str] = field(default_factory=list)

    def open(self, bucket: int) -> None:
        if bucket < NUM_LAYERS:
            self.log.append(f"gather {bucket} may begin")
            self.events[bucket].set()

    def hold(self, collectives: Any) -> None:
        """Let no bucket's all-gather begin on this rank before its gate is open."""
        start = collectives.start

        def start_later(bucket: Bucket, collective: Collective, step: int) -> Work:
            assert collective is Collective.ALL_GATHER
            assert self.events[bucket.index].wait(DEADLINE_S), f"rank 0 waits for bucket {bucket.index} too early"
            return start(bucket, collective, step)

        collectives.start = start_later

    def watch(self, layer: nn.Module, number: int) -> None:
        """Note when ``layer`` computes; after it, the next one's parameters may come."""
        layer.register_forward_pre_hook(lambda *_: self.log.append(f"layer {number} computes"))
        layer.register_forward_hook(lambda *_: self.open(number + 1))


def _layers() -> nn.Sequential:
    """Return the same layers every time, whatever other threads draw."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_(std=WIDTH**-0.5, generator=generator)
    return layers


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_all_gather_runs_under_the_forward_pass(run_fleets: Any) -> None:
    gates = _Gates()
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5))
    reference = _layers()
    reference(batch).square().sum().backward()
    _optimizer(reference).step()

    def body(fleet: Fleet) -> torch.Tensor:
        plain = _layers()
        model, optimizer = distribute(
            plain, _optimizer(plain), Sharded(bucket_bytes=1, overlap_forward=True), fleet=fleet
        )
        assert len(optimizer.training.updater.buckets) == NUM_LAYERS
        model(batch).square().sum().backward()
        optimizer.clip_grad_norm_(math.inf)  # waits for the gradients, so that buckets are updated front to back
        if fleet.rank == 0:
            optimizer.step()
            gates.log.append("step returned")
            for number, layer in enumerate(plain):
                gates.watch(layer, number)
            gates.open(0)
        else:
            gates.hold(optimizer.training.updater.collectives)
            optimizer.step()
        return model(batch).detach()  # under no_grad() it would wait for everything first

    outputs = run_fleets(2, body, timeout_s=DEADLINE_S)

    expected = ["step returned", "gather 0 may begin"]
    for number in range(NUM_LAYERS):
        expected.append(f"layer {number} computes")
        expected += [f"gather {number + 1} may begin"] * (number + 1 < NUM_LAYERS)
    assert gates.log == expected
    for output in outputs:
        torch.testing.assert_close(output, reference(batch))


def test_a_step_that_waits_for_others_is_not_taken_for_a_hung_thread(run_fleets: Any) -> None:
    may_gather = threading.Event()

    def body(fleet: Fleet) -> None:
        plain = _layers()
        model, optimizer = distribute(plain, _optimizer(plain), Sharded(bucket_bytes=1), fleet=fleet)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.clip_grad_norm_(math.inf)
        if fleet.rank == 0:
            waiting = fleet.communicator.progress.waiting

            def tell() -> Any:
                may_gather.set()
                return waiting()

            fleet.communicator.progress.waiting = tell  # type: ignore[method-assign]
        else:
            assert may_gather.wait(DEADLINE_S), "rank 0 does not say that it waits"
        optimizer.step()

    run_fleets(2, body, timeout_s=DEADLINE_S)


def test_no_gather_is_over_when_step_returns(run_fleets: Any) -> None:
    may_step = threading.Event()

    def num_gathers(fleet: Fleet) -> int:
        return fleet.statistics().calls.get("all_gather", 0)

    def body(fleet: Fleet) -> tuple[int, int]:
        plain = _layers()
        model, optimizer = distribute(
            plain, _optimizer(plain), Sharded(bucket_bytes=1, overlap_forward=True), fleet=fleet
        )
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.clip_grad_norm_(math.inf)
        before = num_gathers(fleet)
        if fleet.rank == 1:
            assert may_step.wait(DEADLINE_S), "step() of rank 0 waits for rank 1"
        optimizer.step()
        at_return = num_gathers(fleet)
        may_step.set()
        optimizer.synchronize()
        return at_return - before, num_gathers(fleet) - before

    results = run_fleets(2, body, timeout_s=DEADLINE_S)

    assert results[0] == (0, NUM_LAYERS)
    assert results[1][1] == NUM_LAYERS


def test_state_is_counted_when_the_step_that_makes_it_is_over(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> int:
        model = _layers()
        rule = Sharded(overlap_forward=True)
        model, optimizer = distribute(model, torch.optim.Adam(model.parameters()), rule, fleet=fleet)
        updater: Any = optimizer.training.updater
        waits, synchronize = threading.Event(), updater.synchronize
        for shard in updater.shards:
            step = shard.step
            shard.step = lambda *given, step=step, **named: waits.wait(DEADLINE_S) and step(*given, **named)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        updater.synchronize = lambda: (waits.set(), synchronize())
        num_bytes = optimizer.num_state_bytes
        waits.set()
        return num_bytes

    assert sum(run_fleets(2, body)) >= 2 * 4 * NUM_LAYERS * WIDTH * WIDTH, "two moments of each element"
