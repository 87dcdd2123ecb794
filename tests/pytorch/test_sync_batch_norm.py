"""SyncBatchNorm: equal to one process that has all batches, forward and backward, whatever the ranks' shares."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from oracle_models import copies
from torch import nn

from syncline.errors import UpdateError
from syncline.pytorch.control import join
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.pytorch.sync_batch_norm import restore_layers, synchronise_layers
from syncline.updates import AllReduce, Clustered, LocalSteps, Overlapped, Sharded
from syncline.updates.control import ControlStream

SHAPES = {"1d": (4,), "1d_with_length": (4, 5), "2d": (4, 3, 2), "3d": (4, 2, 3, 2)}
SHARES = {"equal": (4, 4, 4), "unequal": (1, 7, 3), "one_has_none": (5, 0, 4)}
TOLERANCE = 1e-10


def control_of(fleet: Fleet) -> ControlStream:
    return ControlStream(fleet.communicator, stream=fleet.reserve_streams(1)[0])


def draw(*shape: int, offset: float = 0.0, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


def alone(layer: nn.SyncBatchNorm, steps: list[torch.Tensor], slopes: torch.Tensor) -> tuple[nn.Module, list[Any]]:
    """Go through the whole batches with BatchNorm; return it, and outputs and input gradients of each step."""
    plain = nn.BatchNorm1d(layer.num_features).double()
    plain._check_input_dim = lambda _: None  # any number of dimensions
    plain.__dict__.update(copy.deepcopy(layer).__dict__)
    seen = []
    for inputs in steps:
        own = inputs.clone().requires_grad_()
        output = plain(own)
        (output * slopes).sum().backward()
        seen.append((output.detach(), own.grad))
    return plain, seen


def together(
    layer: nn.SyncBatchNorm, steps: list[torch.Tensor], slopes: torch.Tensor, shares: tuple[int, ...], run_fleets: Any
) -> tuple[list[nn.Module], list[Any]]:
    layers = copies(layer, len(shares))

    def body(fleet: Fleet) -> list[Any]:
        made = synchronise_layers(layers[fleet.rank], control_of(fleet), lambda: 1.0)
        seen = []
        for inputs in steps:
            own = inputs.split(shares)[fleet.rank].clone().requires_grad_()
            output = layers[fleet.rank](own)
            (output * slopes.split(shares)[fleet.rank]).sum().backward()
            seen.append((output.detach(), own.grad))
        restore_layers(made)
        return seen

    of_ranks = run_fleets(len(shares), body)
    return layers, [
        tuple(torch.cat([of_ranks[rank][step][kind] for rank in range(len(shares))]) for kind in (0, 1))
        for step in range(len(steps))
    ]


def check_against_one_process(
    layer: nn.SyncBatchNorm, steps: list[torch.Tensor], shares: tuple[int, ...], run_fleets: Any
) -> None:
    slopes = draw(*steps[0].shape, seed=5)
    reference, expected = alone(layer, steps, slopes)
    layers, found = together(layer, steps, slopes, shares, run_fleets)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    for one in layers:
        for name, value in reference.state_dict().items():
            if name in ("running_mean", "running_var", "num_batches_tracked"):
                torch.testing.assert_close(one.state_dict()[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    for name, value in reference.named_parameters():
        total = sum(dict(one.named_parameters())[name].grad for one in layers)
        torch.testing.assert_close(total, value.grad, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_one_process_on_all_batches(shape: str, shares: str, run_fleets: Any) -> None:
    layer = nn.SyncBatchNorm(4).double()
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    steps = [draw(sum(SHARES[shares]), *SHAPES[shape], offset=step, seed=step) for step in range(3)]
    check_against_one_process(layer, steps, SHARES[shares], run_fleets)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 1e-2}],
    ids=["cumulative", "not_affine", "not_tracked", "momentum_and_eps"],
)
def test_options_are_those_of_torch(options: dict[str, Any], run_fleets: Any) -> None:
    layer = nn.SyncBatchNorm(4, **options).double()
    steps = [draw(9, 4, 2, offset=step, seed=step) for step in range(3)]
    check_against_one_process(layer, steps, (2, 4, 3), run_fleets)


def test_channels_far_from_zero_lose_no_digits(run_fleets: Any) -> None:
    """Sums of squares alone would lose 12 of 16 digits; so would a shift that was right one step ago."""
    layer = nn.SyncBatchNorm(4).double()
    offsets = torch.tensor([0.0, 1e6, -1e6, 1.0], dtype=torch.float64)
    steps = [draw(9, 4, seed=step) + (-1) ** step * offsets for step in range(3)]
    slopes = draw(9, 4, seed=5)
    found = together(layer, steps, slopes, (2, 4, 3), run_fleets)[1]
    for inputs, (output, _) in zip(steps, found, strict=True):
        mean = inputs.mean(0)
        exact = (inputs - mean) / ((inputs - mean).square().mean(0) + layer.eps).sqrt()
        torch.testing.assert_close(output, exact, rtol=1e-9, atol=1e-9)


def test_a_channel_that_is_constant_or_not_finite_stays_so_alone(run_fleets: Any) -> None:
    layer = nn.SyncBatchNorm(3).double()
    steps = [draw(6, 3, seed=step) for step in range(3)]
    for step in steps:
        step[:, 0] = 7.0
    steps[0][4, 1] = float("nan")
    _, found = together(layer, steps, torch.ones(6, 3, dtype=torch.float64), (2, 4), run_fleets)
    assert found[0][0][:, 1].isnan().all(), "as in one process, NaN is in the statistics"
    for step, (output, _) in zip(steps, found, strict=True):
        assert (output[:, 0] == 0).all()
        exact = (step - step.mean(0)) / (step.var(0, correction=0) + layer.eps).sqrt()
        torch.testing.assert_close(output[:, 1:], exact[:, 1:], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_number_types_of_inputs_are_kept(dtype: torch.dtype, run_fleets: Any) -> None:
    layer = nn.SyncBatchNorm(4)
    inputs = draw(6, 4, 3).to(dtype)
    layers = copies(layer, 2)

    def body(fleet: Fleet) -> torch.Tensor:
        synchronise_layers(layers[fleet.rank], control_of(fleet), lambda: 1.0)
        own = inputs.split([2, 4])[fleet.rank].clone().requires_grad_()
        output = layers[fleet.rank](own)
        output.sum().backward()
        assert own.grad is not None
        assert own.grad.dtype == output.dtype == dtype
        return output

    found = torch.cat(run_fleets(2, body))
    exact = nn.BatchNorm1d(4)(inputs.float())
    torch.testing.assert_close(found.float(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_losses_of_other_ranks_are_weighted_as_in_the_mean(run_fleets: Any) -> None:
    """Each rank's loss is a mean over its own batch; together they are the mean over all samples."""
    template = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    reference = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    reference.load_state_dict(template.state_dict())
    models, shares = copies(template, 3), (2, 7, 3)
    steps = [draw(12, 3, seed=step) for step in range(3)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for inputs in steps:
        optimizer.zero_grad()
        reference(inputs).square().mean().backward()
        optimizer.step()

    def body(fleet: Fleet) -> None:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.5)
        model, distributed = distribute(models[fleet.rank], inner, AllReduce(), samples=len, fleet=fleet)
        for inputs in steps:
            distributed.zero_grad()
            model(inputs.split(shares)[fleet.rank]).square().mean().backward()
            distributed.step()

    run_fleets(3, body)
    for model in models:
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_copies_and_closed_fleets_leave_plain_layers(run_fleets: Any) -> None:
    models = copies(nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)), 2)

    def body(fleet: Fleet) -> list[nn.Module]:
        inner = torch.optim.SGD(models[fleet.rank].parameters(), lr=0.5)
        model, _ = distribute(models[fleet.rank], inner, Sharded(), fleet=fleet)
        assert type(model[1]) is not nn.SyncBatchNorm
        assert isinstance(model[1], nn.SyncBatchNorm)
        assert repr(model[1]) == repr(nn.SyncBatchNorm(4))
        return [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    for model in [*models, *(one for found in run_fleets(2, body) for one in found)]:
        assert type(model[1]) is nn.SyncBatchNorm
        assert vars(model[1]).keys() == vars(nn.SyncBatchNorm(4)).keys()
        model(torch.ones(2, 3))  # no rank is asked


def test_evaluation_asks_no_rank(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> torch.Tensor | None:
        layer = nn.SyncBatchNorm(4)
        synchronise_layers(layer, control_of(fleet), lambda: 1.0)
        return layer.eval()(torch.ones(2, 4)) if fleet.rank == 0 else None

    plain = nn.BatchNorm1d(4).eval()
    assert torch.equal(run_fleets(2, body)[0], plain(torch.ones(2, 4)))


def test_one_value_of_each_channel_is_refused_on_every_rank(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        layer = nn.SyncBatchNorm(4)
        synchronise_layers(layer, control_of(fleet), lambda: 1.0)
        layer(torch.ones(1 - fleet.rank, 4))

    for error in run_fleets(2, body, accept=UpdateError):
        assert "more than one value of each channel" in str(error)


@pytest.mark.parametrize("rule", [Overlapped(), Clustered(), LocalSteps()], ids=["overlapped", "clustered", "local"])
def test_rules_that_never_wait_refuse_it(rule: Any, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
        with pytest.raises(UpdateError, match=r"'1' is a SyncBatchNorm.*use BatchNorm or GroupNorm"):
            distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, fleet=fleet)

    run_fleets(2, body)


class Renamed(nn.SyncBatchNorm):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * inputs)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(Renamed(4), "forward\\(\\) of its own"), (nn.SyncBatchNorm(4, process_group=object()), "process_group")],
    ids=["own_forward", "process_group"],
)
def test_what_would_be_lost_is_refused(layer: nn.Module, message: str, run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        with pytest.raises(UpdateError, match=message):
            distribute(layer, torch.optim.SGD(layer.parameters(), lr=0.1), fleet=fleet)

    run_fleets(1, body)


def test_ranks_cannot_join_with_it(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        inner = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
        model, _ = distribute(inner, torch.optim.SGD(inner.parameters(), lr=0.1), fleet=fleet)
        with (
            pytest.raises(UpdateError, match=r"that of '1', a SyncBatchNorm, waits for every rank"),
            join(model),
        ):
            pass

    run_fleets(1, body)


def test_ranks_that_differ_in_it_are_told(run_fleets: Any) -> None:
    def body(fleet: Fleet) -> None:
        norm = nn.SyncBatchNorm(4) if fleet.rank else nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Linear(3, 4), norm)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet=fleet)

    for error in run_fleets(2, body, accept=UpdateError):
        assert "rank 1: it has 'module 1: SyncBatchNorm'" in str(error)


def test_a_compiled_model_synchronises(run_fleets: Any) -> None:
    models = copies(nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)).double(), 2)
    inputs = draw(6, 3)
    expected = nn.BatchNorm1d(4).double()(models[0][0](inputs)).detach()
    torch._dynamo.reset()

    def body(fleet: Fleet) -> torch.Tensor:
        synchronise_layers(models[fleet.rank], control_of(fleet), lambda: 1.0)
        whole = torch.compile(models[fleet.rank], backend="aot_eager") if fleet.rank else models[fleet.rank]
        output = whole(inputs.split([2, 4])[fleet.rank])
        output.sum().backward()
        return output.detach()

    found = torch.cat(run_fleets(2, body))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
