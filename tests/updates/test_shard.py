"""A shard steps like the user's optimizer on the same elements, whatever was used, and keeps state for no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.updates.bucket import Bucket, ParameterEntry, plan_buckets
from syncline.updates.inner import ELEMENTWISE, hyperparameters
from syncline.updates.shard import Shard
from syncline.updates.state import WholeState

SHAPES = [(4, 3), (5,), (), (2, 2)]
OWNED = ((2, 7), (9, 14), (16, 20))
NUM_ELEMENTS = 22


def make_bucket() -> tuple[Bucket, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.nn.Parameter(torch.randn(shape, generator=generator).double()) for shape in SHAPES]
    entries = [
        ParameterEntry(
            name=f"p{number}",
            group=0,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        for number, tensor in enumerate(tensors)
    ]
    (plan,) = plan_buckets(entries, bucket_bytes=1 << 20)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return Bucket(plan, parameters=flat, gradients=torch.zeros_like(flat), owners=tensors), tensors


def run(
    make: Callable[[Any], torch.optim.Optimizer], presence: list[list[bool]], *, reload_at: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step a shard and the plain optimizer; return the elements of both."""
    bucket, tensors = make_bucket()
    plain = make(tensors)
    shard = Shard(bucket, [OWNED], make(tensors), whole_parameters=False)
    generator = torch.Generator().manual_seed(5)
    for number, present in enumerate(presence):
        gradients = torch.randn(NUM_ELEMENTS, generator=generator).double()
        for slot, tensor, is_present in zip(bucket.plan.slots, tensors, present, strict=True):
            tensor.grad = slot.view(gradients).clone() * 0.5 if is_present else None
        if number == reload_at:
            state = {f"p{place}": dict(plain.state[tensor]) for place, tensor in enumerate(tensors)}
            shard = Shard(bucket, [OWNED], make(tensors), whole_parameters=False)
            shard.load_state(WholeState([bucket], state))
        bucket.gradients.copy_(gradients)
        plain.step()
        shard.scale([0.5] * len(SHAPES))
        shard.step(hyperparameters(plain, 0), present)
    return bucket.parameters, torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    owned = torch.zeros(NUM_ELEMENTS, dtype=torch.bool)
    for start, stop in OWNED:
        owned[start:stop] = True
    torch.testing.assert_close(found[owned], expected[owned], rtol=1e-12, atol=1e-13)
    before, _ = make_bucket()
    assert torch.equal(found[~owned], before.parameters[~owned]), "other ranks' elements are left alone"


PATTERNS = {
    "all": [[True] * 4] * 4,
    "late": [[True, False, True, True], [True, False, True, False], [True] * 4, [False, True, True, True]],
    "never": [[True, True, False, True]] * 4,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_like_the_plain_optimizer(kind: type[torch.optim.Optimizer], pattern: str) -> None:
    check(
        *run(
            lambda tensors: (
                kind(tensors, lr=0.05, weight_decay=0.1)
                if "prop" not in kind.__name__.lower()
                else kind(tensors, lr=0.05)
            ),
            PATTERNS[pattern],
        )
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD])
def test_state_is_divided_again_when_it_is_loaded(kind: type[torch.optim.Optimizer], pattern: str) -> None:
    check(*run(lambda tensors: kind(tensors, lr=0.05), PATTERNS[pattern], reload_at=2))


def test_state_is_that_of_owned_elements() -> None:
    bucket, tensors = make_bucket()
    shard = Shard(bucket, [OWNED], torch.optim.SGD(tensors, lr=0.1, momentum=0.9), whole_parameters=False)
    assert sum(segment.num_elements for segment in shard.segments) == 14
    assert shard.num_state_bytes == 0
    bucket.gradients.fill_(1.0)
    shard.step({}, [True] * 4)
    assert shard.num_state_bytes == 14 * 8
    entries = {(entry.parameter, entry.start, entry.stop) for entry in shard.state_entries()}
    assert entries == {("p0", 2, 7), ("p0", 9, 12), ("p1", 0, 2), ("p1", 4, 5), ("p2", 0, 1), ("p3", 0, 2)}


@pytest.mark.parametrize("reload", [False, True])
def test_each_group_of_ranges_is_stepped_by_itself(reload: bool) -> None:
    """So that all owners of an element step tensors of the same size, after a state was loaded too."""
    groups = [((2, 7), (16, 20)), ((9, 14),)]
    bucket, tensors = make_bucket()
    shard = Shard(bucket, groups, torch.optim.SGD(tensors, lr=0.1, momentum=0.9), whole_parameters=False)
    if reload:
        shard.load_state(WholeState([bucket], {f"p{number}": {"step": 3} for number in range(4)}))
    assert [sum(segment.num_elements for segment in segments) for segments, _ in shard.views()] == [9, 5]
    assert sum(segment.num_elements for segment in shard.segments) == 14
    bucket.gradients.fill_(1.0)
    shard.step({}, [True, True, True, False])
    sizes = sorted(sum(segment.num_elements for segment in segments) for segments, _ in shard.views())
    assert sizes == [2, 5, 7], "what was not used is divided off"
    before, _ = make_bucket()
    moved = (bucket.parameters - before.parameters).abs() > 0.05
    assert moved.nonzero().flatten().tolist() == [2, 3, 4, 5, 6, *range(9, 14), 16, 17]


def test_a_rank_that_owns_nothing_has_nothing() -> None:
    bucket, tensors = make_bucket()
    shard = Shard(bucket, (), torch.optim.Adam(tensors), whole_parameters=False)
    shard.step({}, [True] * 4)
    shard.load_state(WholeState([bucket], {}))
    assert shard.num_state_bytes == 0
    assert not list(shard.state_entries())


def test_what_a_rank_is_the_spare_of_is_stepped_like_what_it_owns() -> None:
    bucket, tensors = make_bucket()
    before = bucket.parameters.clone()
    plain = torch.optim.Adam(tensors, lr=0.1)
    shard = Shard(bucket, [((0, 8),)], plain, whole_parameters=False, spared=[((8, 15),)])
    for _ in range(2):
        bucket.gradients.fill_(0.5)
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, 0.5)
        plain.step()
        shard.step(hyperparameters(plain, 0), [True] * len(SHAPES))
    expected = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    torch.testing.assert_close(bucket.parameters[:15], expected[:15], rtol=1e-12, atol=1e-13)
    assert torch.equal(bucket.parameters[15:], before[15:])
    spared = [entry.value for entry in shard.state_entries() if entry.is_spare and entry.key == "exp_avg"]
    assert sum(value.numel() for value in spared) == 7
