"""A period's end by all-reduce: sums in fixed point, and what it costs the links between two sites."""

import itertools

import pytest
import torch
from overlapped_replay import tree_mean
from overlapped_training import one_step, start

from small_regression import make_sgd
from syncline.errors import UpdateError
from syncline.fabric import BULK
from syncline.pytorch.distribute import distribute
from syncline.topology import Topology
from syncline.updates import Overlapped
from syncline.updates.flat import shares
from syncline.updates.rounds import exponent_for, from_steps, largest_move, to_steps
from thread_fleets import run_fleets

WEIGHTS = (1.0, 7.0, 3.0, 5.0)


def moved(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(500, generator=generator, dtype=torch.float64).to(dtype)
    moves = [torch.randn(500, generator=generator, dtype=torch.float64) * 0.03 for _ in WEIGHTS]
    return start, [(start.to(torch.float64) + move).to(dtype) for move in moves]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 1.5e-7), (torch.bfloat16, 0.008)]
)
def test_the_mean_in_fixed_point_is_the_weighted_mean(dtype: torch.dtype, tolerance: float) -> None:
    """To half a unit in the last place of ``dtype``, for elements of up to about 3."""
    start, values = moved(dtype)
    out = torch.empty_like(start)
    tree_mean(values, WEIGHTS, start, out=out)
    exact = sum(share * value.to(torch.float64) for share, value in zip(shares(WEIGHTS), values, strict=True))
    assert torch.allclose(out.to(torch.float64), exact, rtol=tolerance, atol=tolerance)


def test_steps_add_up_to_the_same_bits_in_any_order() -> None:
    start, values = moved(torch.float32)
    exponent = exponent_for([largest_move(value, start) for value in values], torch.float32)
    steps = [
        to_steps(value, start, share=share, exponent=exponent)
        for value, share in zip(values, shares(WEIGHTS), strict=True)
    ]
    assert all(one.dtype == torch.int32 for one in steps)
    sums = [((a + b) + c) + d for a, b, c, d in itertools.permutations(steps)]
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-40, 1.0, 1e30])
def test_no_sum_overflows_and_what_has_not_moved_stays(dtype: torch.dtype, size: float) -> None:
    """Also with moves that are as small or as large as numbers can be, and all alike."""
    start = torch.tensor([1.0, 2.0, -3.0], dtype=dtype)
    value = start + torch.tensor([0.0, size, -size], dtype=dtype)
    out = torch.empty_like(start)
    tree_mean([value] * 3, [1.0, 1.0, 1.0], start, out=out)
    assert out[0] == 1.0
    assert torch.allclose(out, value, rtol=1e-6 if dtype == torch.float32 else 1e-14)


def test_nothing_moved_is_exactly_nothing() -> None:
    start, _ = moved(torch.float32)
    out = torch.empty_like(start)
    from_steps(torch.zeros(500, dtype=torch.int32), start, exponent=exponent_for([0.0], torch.float32), out=out)
    assert torch.equal(out, start)


TWO_SITES = """
switch: wide-area
children:
  - {switch: a, uplink: 20 Mbit/s, children: [{host: a0, uplink: 1 Gbit/s}, {host: a1, uplink: 1 Gbit/s}]}
  - {switch: b, uplink: 20 Mbit/s, children: [{host: b0, uplink: 1 Gbit/s}, {host: b1, uplink: 1 Gbit/s}]}
"""


@pytest.mark.parametrize(("options", "times"), [({}, 1), ({"quorum": 3}, 2)])
def test_between_two_sites_the_parameters_pass_once(options: dict, times: int) -> None:
    """Through servers, with M < N, each worker of the other site gets them from the server by itself.

    One step pushes nothing.
    """
    num_bytes = 4 * (200 * 50 + 50)

    def body(fleet):
        model = torch.nn.Linear(200, 50)
        rule = Overlapped(max_staleness=None, **options)
        model, optimizer = distribute(model, make_sgd(model.parameters()), rule, samples="batch", fleet=fleet)
        for link in optimizer.training.updater.client.links:
            link.machine._turnaround = rule.period  # what would not come back in time is held back
        before = sent_up(fleet)
        model(torch.full((2, 200), 1.0 + fleet.rank)).square().sum().backward()
        optimizer.step()
        optimizer.end_period()
        fleet.barrier()
        return sent_up(fleet) - before

    sent = sum(run_fleets(Topology.parse(TWO_SITES), body))
    assert times * num_bytes <= sent < times * num_bytes + 4000


def sent_up(fleet) -> int:
    """What this rank has sent from site a."""
    counted = fleet.statistics().link_bytes
    return sum(num_bytes for link, num_bytes in counted.items() if str(link) == "a up")


def test_all_else_goes_before_what_no_step_waits_for() -> None:
    """Pushes and answers, a head and a gradient each, are patient; the mean of a period, for which all wait, is not."""

    def body(fleet):
        fabric = fleet.communicator._fabric
        sent, send = [], fabric.send

        def note(peer, tag, payload, *, urgency, **settings):
            sent.append((len(payload), urgency))
            send(peer, tag, payload, urgency=urgency, **settings)

        fabric.send = note
        model, optimizer = start(fleet, Overlapped(period=100, max_staleness=0))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        for step in range(2):
            one_step(model, optimizer, fleet.rank, step)
        pushed = [urgency for size, urgency in sent if size > num_bytes]
        num_before = len(sent)
        optimizer.end_period()
        return pushed, [urgency for size, urgency in sent[num_before:] if size == num_bytes]

    for pushed, averaged in run_fleets(3, body):
        assert pushed
        assert min(pushed) >= BULK
        assert averaged
        assert max(averaged) < BULK


def test_parameters_that_are_not_finite_are_told_by_rank_on_every_rank() -> None:
    def body(fleet):
        model, optimizer = start(fleet, Overlapped(period=100, max_staleness=None), make_sgd)
        one_step(model, optimizer, fleet.rank, 0)
        if fleet.rank == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        optimizer.end_period()

    for error in run_fleets(3, body, accept=UpdateError):
        assert isinstance(error, UpdateError)
        assert "Parameters of rank 1 are not finite" in str(error)
