"""State that is divided within a party, or within a cluster: the same training as where each rank keeps all of it.

A sum of two ranks' gradients has the same bits in either order, and an element's step depends on that element alone. So
with two ranks in a party parameters end with the same bits; but for Adam, whose kernels may round otherwise where a
tensor ends.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from small_racks import TWO_SITES
from small_regression import batch, loss_of, make_adam, make_model, make_sgd, parameters_of
from syncline.errors import ConfigurationError, PeerLostError, UpdateError
from syncline.pytorch.checkpoint import load_checkpoint, save_checkpoint
from syncline.pytorch.distribute import distribute
from syncline.updates import AllReduce, Clustered, LocalSteps, Nesterov, Sharded, matrix_cost
from thread_fleets import run_fleets

WHOLE, DIVIDED = AllReduce(bucket_bytes=160), Sharded(bucket_bytes=160)
"""Of the small regression they make five buckets."""
CLUSTERED = partial(Clustered, clusters=((0, 1), (2, 3)), forecast=0)
PARTIES = {"local steps": partial(LocalSteps, fragments=2), "clusters": CLUSTERED}
"""By rule, what has the parties of the two sites."""
each_rule = pytest.mark.parametrize("rule", PARTIES.values(), ids=PARTIES)


def start(fleet, rule, make=make_adam, model=None):
    model = make_model() if model is None else model
    return distribute(model, make(model.parameters()), rule, samples="batch", fleet=fleet)


def train(fleet, model, optimizer, steps, dtype=torch.float64, between=lambda _: None):
    values = []
    for step in steps:
        loss_of(model, *batch(fleet.rank, step, 3 + fleet.rank + step % 2, dtype)).backward()
        between(step)
        optimizer.step()
        optimizer.zero_grad()
        values.append(parameters_of(model))
    return values


RULES = {
    "overlapped": {"period": 4},
    "in turn": {"period": 4, "fragments": 2, "overlap": False},
    "momentum": {"period": 4, "fragments": 2, "outer": Nesterov()},
    "momentum in turn": {"period": 3, "fragments": 1, "outer": Nesterov(), "overlap": False},
    "given pace": {"period": 4, "pace": {"a0": 1.0, "a1": 1.0, "b0": 0.5, "b1": 0.5}},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_training_is_that_with_whole_state(rule: str, make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, and when the period is ended; fragments cut buckets, so that rounds change parts of shards."""
    monkeypatch.setattr("syncline.updates.local_steps_updater.LEAST_BYTES", 1)

    def body(fleet, within):
        model, optimizer = start(fleet, LocalSteps(within=within, **RULES[rule]), make)
        values = train(fleet, model, optimizer, range(13))
        optimizer.end_period()
        return [*values, parameters_of(model)], optimizer.num_state_bytes, optimizer.statistics().num_rounds

    whole, divided = (run_fleets(TWO_SITES, lambda fleet, each=each: body(fleet, each)) for each in (WHOLE, DIVIDED))
    for (expected, whole_bytes, num_rounds), (values, num_bytes, also) in zip(whole, divided, strict=True):
        assert also == num_rounds > 3
        for step, (one, other) in enumerate(zip(expected, values, strict=True)):
            assert torch.allclose(one, other, rtol=0, atol=1e-12), step
            assert make is make_adam or torch.equal(one, other), step
        if "momentum" not in rule:
            assert 0.35 * whole_bytes < num_bytes < 0.65 * whole_bytes
    a0, a1, b0, b1 = (values for values, *_ in divided)
    assert all(torch.equal(one, other) for one, other in zip(a0, a1, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(b0, b1, strict=True))
    assert not torch.equal(a0[0], b0[0])
    assert torch.equal(a0[-1], b0[-1])


class Uneven(nn.Module):
    """One large parameter, small ones, one that is used in every third step alone, and one that never is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(6, 41, dtype=dtype), nn.Linear(41, 3, bias=False, dtype=dtype)
        self.scale, self.never = nn.Parameter(torch.ones(1, dtype=dtype)), nn.Parameter(torch.ones(5, dtype=dtype))
        self.is_scaled = False
        generator = torch.Generator().manual_seed(3)
        for parameter in (*self.wide.parameters(), *self.deep.parameters()):
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.deep(torch.tanh(self.wide(inputs)))
        return outputs * self.scale if self.is_scaled else outputs


def make_decaying(parameters) -> torch.optim.Optimizer:
    """What is unused must not decay."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("align", ["element", "parameter"])
def test_parameters_of_other_sizes_and_types_that_are_not_always_used(rule, dtype: torch.dtype, align) -> None:
    def body(fleet, within):
        model, optimizer = start(fleet, rule(within=within, period=3), make_decaying, Uneven(dtype))

        def steps():
            for step in range(11):
                model.is_scaled = step % 3 == fleet.rank  # by one rank of a party at most
                yield step

        values = train(fleet, model, optimizer, steps(), dtype)
        optimizer.end_period()
        return [*values, parameters_of(model)]

    whole = run_fleets(TWO_SITES, lambda fleet: body(fleet, WHOLE))
    divided = run_fleets(TWO_SITES, lambda fleet: body(fleet, Sharded(bucket_bytes=160, align=align)))
    for expected, values in zip(whole, divided, strict=True):
        for one, other in zip(expected, values, strict=True):
            if dtype is torch.bfloat16 and align == "element":  # whose kernels, too, round otherwise at the end
                assert torch.allclose(one, other, rtol=0, atol=2**-5)
            else:
                assert torch.equal(one, other)
        assert bool((values[-1][1:6] == 1).all())


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ranks_of_a_party_train_as_a_job_of_them_alone_to_the_bit(rule, dtype: torch.dtype) -> None:
    def body(fleet, chosen):
        model, optimizer = start(fleet, chosen, make_adam, Uneven(dtype))
        return train(fleet, model, optimizer, range(6), dtype)

    together = run_fleets(2, lambda fleet: body(fleet, DIVIDED))[0]
    a0, a1, b0, _ = run_fleets(TWO_SITES, lambda fleet: body(fleet, rule(within=DIVIDED, period=100)))
    assert all(torch.equal(one, other) for one, other in zip(together, a0, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(together, a1, strict=True))
    assert not torch.equal(a0[-1], b0[-1])


@each_rule
@pytest.mark.filterwarnings("ignore:NaN or infinity began")
def test_gradients_are_clipped_added_up_and_scaled_over_the_party(rule) -> None:
    def body(fleet, within):
        model, optimizer = start(fleet, rule(within=within, period=3), make_sgd)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        norms, skipped = [], 0
        for step in range(8):
            with optimizer.no_sync():
                loss_of(model, *batch(fleet.rank, 100 + step, 2)).backward()
            loss = loss_of(model, *batch(fleet.rank, step, 3 + fleet.rank))
            if step == 4 and fleet.rank == 3:  # its party steps as it does: not at all
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torn = step % 2
            norms.append(
                float(
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    if torn
                    else optimizer.clip_grad_norm_(0.05)
                )
            )
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < scale
            optimizer.zero_grad()
        optimizer.end_period()
        return norms, skipped, parameters_of(model)

    whole, divided = (run_fleets(TWO_SITES, lambda fleet, each=each: body(fleet, each)) for each in (WHOLE, DIVIDED))
    for (norms, skipped, expected), (also, skipped_too, values) in zip(whole, divided, strict=True):
        assert also == pytest.approx(norms, rel=1e-6, nan_ok=True)
        assert skipped == skipped_too
        assert torch.allclose(expected, values, rtol=0, atol=1e-9)
    assert [skipped for _, skipped, _ in divided] == [0, 0, 1, 1]
    assert divided[0][0] == divided[1][0] != divided[2][0]


@pytest.mark.parametrize(
    "make",
    [*PARTIES.values(), partial(PARTIES["local steps"], outer=Nesterov())],
    ids=[*PARTIES, "local steps with momentum"],
)
@pytest.mark.parametrize("form", ["checkpoint", "state_dict"])
def test_training_goes_on_to_the_bit(make, form: str, tmp_path: Path) -> None:
    """From a checkpoint of all, or from what each party's ``state_dict()`` says; each party has a state of its own."""
    rule = make(period=4, within=DIVIDED)
    outer, kept = getattr(rule, "outer", None), {}

    def first(fleet):
        model, optimizer = start(fleet, rule)
        train(fleet, model, optimizer, range(6))
        if form == "checkpoint":
            save_checkpoint(tmp_path / "saved", model, optimizer)
        else:
            optimizer.end_period()
            kept[fleet.rank] = optimizer.state_dict(), {key: each.clone() for key, each in model.state_dict().items()}
            kept[fleet.rank] = torch_copy(kept[fleet.rank])
        return go_on(fleet, model, optimizer)

    def second(fleet):
        model, optimizer = start(fleet, rule)
        train(fleet, model, optimizer, [77])  # of as many samples as the last: a mean is divided by what was before
        if form == "checkpoint":
            load_checkpoint(tmp_path / "saved", model, optimizer)
            assert optimizer.iteration == 6
        else:
            optimizer.end_period()
            optimizer.load_state_dict(kept[fleet.rank][0])
            model.load_state_dict(kept[fleet.rank][1])
            optimizer.training.updater.go_on_from(6)
        return go_on(fleet, model, optimizer)

    def go_on(fleet, model, optimizer):
        values = train(fleet, model, optimizer, range(6, 13))
        own = optimizer.state_dict()["state"]
        optimizer.end_period()
        return [*values, parameters_of(model)], own[0]["exp_avg"].clone(), own[0].get("outer_velocity")

    whole, resumed = run_fleets(TWO_SITES, first), run_fleets(TWO_SITES, second)
    for (values, own, velocity), (again, own_again, velocity_again) in zip(whole, resumed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(values, again, strict=True))
        assert torch.equal(own, own_again)
        assert (velocity is None) == (velocity_again is None) == (outer is None)
    assert torch.equal(whole[0][1], whole[1][1])
    assert not torch.equal(whole[0][1], whole[2][1])


def torch_copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: torch_copy(each) for key, each in value.items()}
    return type(value)(map(torch_copy, value)) if isinstance(value, (tuple, list)) else value


MOMENTUM = partial(LocalSteps, outer=Nesterov(), overlap=False)


@pytest.mark.parametrize(
    ("small", "large", "keys"),
    [
        (MOMENTUM, MOMENTUM, {"exp_avg", "outer_velocity"}),
        (partial(CLUSTERED, clusters=((0,), (1, 2))), CLUSTERED, {"exp_avg"}),
    ],
    ids=PARTIES,
)
@pytest.mark.parametrize(("before", "after"), [(DIVIDED, WHOLE), (WHOLE, DIVIDED)], ids=["joined", "divided"])
def test_a_checkpoint_goes_to_other_parties_which_have_one_state_each(
    small, large, keys, before, after, tmp_path: Path
) -> None:
    """Of one rank and two, then of two and two, by the other rule within: each party has the state that it had."""

    def save(fleet):
        model, optimizer = start(fleet, small(period=4, within=before))
        train(fleet, model, optimizer, range(5))
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return state_of(optimizer)

    def load(fleet):
        model, optimizer = start(fleet, large(period=4, within=after))
        load_checkpoint(tmp_path / "saved", model, optimizer)
        state = state_of(optimizer)
        train(fleet, model, optimizer, range(5, 11))
        before_end = parameters_of(model)
        optimizer.end_period()
        return state, before_end, parameters_of(model)

    def state_of(optimizer):
        return {key: each.clone() for key, each in optimizer.state_dict()["state"][2].items()}

    a0, b0, b1 = run_fleets(TWO_SITES.restricted((0, 2, 3)), save)
    loaded = run_fleets(TWO_SITES, load)
    for expected, (state, _, _) in zip((a0, a0, b0, b1), loaded, strict=True):
        assert expected.keys() == state.keys() >= keys
        assert all(torch.equal(each, state[key]) for key, each in expected.items())
    assert torch.equal(loaded[0][1], loaded[1][1])
    assert torch.equal(loaded[2][1], loaded[3][1])
    assert all(torch.equal(ended, loaded[0][2]) for _, _, ended in loaded)


@pytest.mark.parametrize(
    "options",
    [
        {"period": "auto"},
        {"compress": "int8"},
        {"parties": ["wide-area"]},
        {"parties": ["a", "b0", "b1"]},
        {"within": Sharded(align="parameter", cost=matrix_cost, portions="fastest")},
    ],
)
def test_what_else_may_be_asked_for_goes_with_it(options) -> None:
    def body(fleet):
        rule = LocalSteps(**{"period": 4, "within": DIVIDED, **options})
        model, optimizer = start(fleet, rule, model=make_model(torch.float32))
        before = train(fleet, model, optimizer, range(19), torch.float32)[-1]
        optimizer.end_period()
        return before, parameters_of(model), optimizer.num_state_bytes, optimizer.statistics().parties

    results = run_fleets(TWO_SITES, body)
    for party in results[0][3]:
        assert all(torch.equal(results[rank][0], results[party[0]][0]) for rank in party)
        assert sum(results[rank][2] for rank in party) == pytest.approx(8 * 93, abs=4 * 40)
    assert all(torch.equal(ended, results[0][1]) for _, ended, *_ in results)


class DeathError(Exception):
    """This rank dies here."""


def lose_rank_1(rule, step_of_death, prepare=lambda *_: None) -> None:
    """See that all others end, and name it."""

    def body(fleet):
        model, optimizer = start(fleet, rule)
        train(fleet, model, optimizer, range(step_of_death))
        prepare(fleet, optimizer.training.updater)

        def die(_):
            if fleet.rank == 1:
                raise DeathError

        train(fleet, model, optimizer, range(step_of_death, 20), between=die)

    first, _, third, fourth = run_fleets(TWO_SITES, body, accept=(DeathError, PeerLostError))
    for error in (first, third, fourth):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1


@each_rule
@pytest.mark.parametrize("within", [WHOLE, DIVIDED])
def test_a_rank_that_is_lost_ends_the_job_of_its_party_and_of_the_others(rule, within) -> None:
    lose_rank_1(rule(period=2, within=within), 3)


@pytest.mark.parametrize("within", [WHOLE, DIVIDED])
def test_whose_loss_was_the_first_is_named_by_a_cluster_that_ends_for_it(within) -> None:
    """Rank 2 hears of it before it begins its pass, for which rank 3 waits, and leaves; rank 3 hears of it late."""

    def part(fleet, updater) -> None:
        driver = updater._driver
        lose = driver._on_lost
        if fleet.rank == 3:
            driver._on_lost = lambda *loss: driver._port.call_later(0.3, partial(lose, *loss))
        elif fleet.rank == 2:
            driver._wait_for(lambda: False, 30.0)

    lose_rank_1(CLUSTERED(period=2, within=within), 2, part)


@pytest.mark.parametrize(
    ("rule", "party", "instead"),
    [(LocalSteps, "party", "give compress to LocalSteps itself"), (Clustered, "cluster", "leave out compress")],
)
@pytest.mark.parametrize(
    ("within", "message"),
    [
        (AllReduce(compress="int8"), "compress='int8'.* inside of a {party}.* {instead}"),
        (Sharded(compress="auto"), "compress='auto'.* {instead}"),
        (Sharded(overlap_forward=True), "overlap_forward=True.* a {party},.*; leave out overlap_forward"),
        (Sharded(step_in_backward=True), "step_in_backward=True.*; leave out step_in_backward"),
        (Sharded(replicate="host"), "replicate='host'.*; leave out replicate"),
        (Sharded(spares=1), "spares=1.*; leave out spares"),
        (Sharded(portions={"a0": 1.0}), "portions=.* of hosts.* each {party}.* give a number"),
        (7, "within must be"),
        (Sharded, "not the class Sharded; give an object"),
    ],
)
def test_what_does_not_suit_a_party_is_refused(rule, party: str, instead: str, within, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.format(party=party, instead=instead)):
        rule(within=within)


@each_rule
def test_what_would_lose_a_part_of_the_state_is_refused(rule, tmp_path: Path) -> None:
    def body(fleet):
        model, divided = make_model(), rule(within=DIVIDED, **({"clusters": 1} if rule is CLUSTERED else {}))
        name = type(divided).__name__
        for options, why in (({"elastic": True}, "elastic=True"), ({"save_on_failure": tmp_path}, "save_on_failure=")):
            with pytest.raises(UpdateError, match=rf"{why} does not go with {name}\(\), with within=.*Sharded\(\)"):
                distribute(model, make_sgd(model.parameters()), divided, fleet=fleet, **options)
        with pytest.raises(UpdateError, match="LBFGS evaluates the model inside step"):
            distribute(model, torch.optim.LBFGS(model.parameters()), divided, fleet=fleet)
        with pytest.raises(UpdateError, match=r'use Sharded\(align="parameter"\)'):
            distribute(model, torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), divided, fleet=fleet)

    run_fleets(1, body)
