"""Losses at any call of a training on threads: who is left stays equal, whatever the step is made of."""

import random
import threading

import pytest
import torch
from mortal_fleets import run_mortals
from torch import nn

import syncline
from syncline.errors import PeerLostError, UpdateError
from thread_fleets import run_fleets

NUM_RANKS, NUM_STEPS = 4, 5
_drawing = threading.Lock()


def make_model(kind):
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(1)
        norm = {"sync": nn.SyncBatchNorm(6), "batch": nn.BatchNorm1d(6)}.get(kind, nn.Identity())
        return nn.Sequential(nn.Linear(3, 6), norm, nn.Tanh(), nn.Linear(6, 2)).double()


def loss_of(model, rank, step, part=0):
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    return model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean()


def plain_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def accumulated_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    with syncline.no_sync(model):
        loss_of(model, rank, step).backward()
    loss_of(model, rank, step, part=1).backward()
    loss_of(model, rank, step, part=2).backward()  # a second pass that all see
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()


def closure_step(model, optimizer, rank, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    optimizer.step(closure)


def scaled_step(model, optimizer, rank, step):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, rank, step)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


KINDS = {
    "batch norm": ("batch", plain_step, lambda parameters: torch.optim.Adam(parameters, lr=0.02)),
    "synchronised batch norm": ("sync", plain_step, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "accumulation and clipping": ("", accumulated_step, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "closures": ("", closure_step, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)),
    "scaled gradients": ("", scaled_step, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
}


def train(kind, deaths):
    """Train on threads; return the members and parameters after each step, of each rank that lived."""
    norm, step_of, optimizer_of = KINDS[kind]

    def body(fleet, mortal):
        model = make_model(norm)
        rule = syncline.AllReduce(bucket_bytes=128)
        model, optimizer = syncline.distribute(
            model, optimizer_of(model.parameters()), rule, elastic=True, check_every=2, fleet=fleet
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        steps, rank = [], fleet.rank
        with mortal():
            for step in range(NUM_STEPS):
                step_of(model, optimizer, rank, step)
                scheduler.step()
                steps.append([parameter.detach().clone() for parameter in model.parameters()])
            members = fleet.members
        return steps, members, [buffer.clone() for buffer in model.buffers()]

    return run_mortals(NUM_RANKS, deaths, body)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_left_stays_equal_wherever_ranks_die(kind):
    draw = random.Random(kind)
    for num_dead in (1, 1, 2):
        deaths = {rank: draw.randrange(2, 40) for rank in draw.sample(range(NUM_RANKS), num_dead)}
        lived = train(kind, deaths)
        ended = {rank: result for rank, result in lived.items() if not isinstance(result, Exception)}
        stopped = [result for result in lived.values() if isinstance(result, Exception)]
        assert all(isinstance(error, syncline.QuorumLostError) for error in stopped), (deaths, stopped)
        assert ended or num_dead == 2, (deaths, lived)
        for steps, members, _ in ended.values():
            first, first_members, _ = next(iter(ended.values()))
            assert members == first_members == tuple(ended), deaths
            for ours, theirs in zip(steps, first, strict=True):
                assert all(map(torch.equal, ours, theirs)), f"{kind} differs after {deaths}"


@pytest.mark.parametrize("accused", [0, 1, 2])
def test_who_hears_that_two_lost_each_other_accuses_neither(accused):
    """The higher one, rank 3, is the first to find the other silent, and its calls end those of all ranks."""
    is_lost = threading.Event()

    def lose(fleet, peer):
        error = PeerLostError(f"rank {peer} is lost", rank=peer, host=fleet.topology.host_of(peer).name)
        communicator = fleet.communicator
        communicator._loop.call_soon(communicator._fabric._lose, peer, error)

    def body(fleet):
        model = make_model("")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)
        for step in range(NUM_STEPS):
            if (fleet.rank, step) == (3, 2):
                lose(fleet, accused)
                fleet.communicator._loop.call_soon(is_lost.set)
            if (fleet.rank, step) == (accused, 2):
                assert is_lost.wait(60.0)
                lose(fleet, 3)
            plain_step(model, optimizer, fleet.rank, step)
        return fleet.members

    *lived, left = run_fleets(NUM_RANKS, body, accept=syncline.QuorumLostError)
    assert lived == [(0, 1, 2)] * 3
    assert isinstance(left, syncline.QuorumLostError)


def test_two_models_of_one_job_go_on_together():
    def body(fleet, mortal):
        rank = fleet.rank
        pairs = []
        for _ in range(2):
            model = make_model("batch")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pairs.append(syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet))
        with mortal():
            for step in range(NUM_STEPS):
                for model, optimizer in pairs:
                    plain_step(model, optimizer, rank, step)
            return [parameter.detach().clone() for model, _ in pairs for parameter in model.parameters()], fleet.members

    for deaths in ({0: 9}, {2: 14}, {1: 21, 3: 30}):
        lived = run_mortals(NUM_RANKS, deaths, body)
        (first, members), *others = lived.values()
        assert set(members) == set(lived)
        assert all(all(map(torch.equal, first, values)) for values, _ in others), deaths


def test_members_are_told_of_the_change_when_all_are_equal():
    def body(fleet, mortal):
        model = make_model("")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)
        told, rank = [], fleet.rank

        def note(change):
            total = torch.tensor([1.0])
            fleet.all_reduce(total)  # allowed here
            told.append((change, optimizer.iteration, float(total)))

        optimizer.on_membership_change(note)
        with mortal():
            for step in range(NUM_STEPS):
                plain_step(model, optimizer, rank, step)
        return told, fleet.rank, fleet.world_size, fleet.topology.num_ranks, fleet.statistics().epoch

    lived = run_mortals(NUM_RANKS, {1: 7}, body)
    assert set(lived) == {0, 2, 3}
    for place, (told, *now) in enumerate(lived.values()):
        [(change, iteration, total)] = told
        assert (change.epoch, change.members, change.lost, change.joined) == (1, (0, 2, 3), (1,), ())
        assert (iteration, total) == (change.iteration, 3.0)
        assert now == [place, 3, 3, 1]


@pytest.mark.parametrize("death", [{0: 2}, {0: 5}, {2: 3}, {1: 6, 0: 9}])
def test_a_checkpoint_is_whole_wherever_ranks_die_while_it_is_saved(death, tmp_path):
    def body(fleet, mortal):
        model = make_model("")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)
        plain_step(model, optimizer, fleet.rank, 0)
        with mortal():
            syncline.save_checkpoint(tmp_path / "run", model, optimizer, extra=fleet.members)
            plain_step(model, optimizer, fleet.rank, 1)
        return [parameter.detach().clone() for parameter in model.parameters()]

    lived = run_mortals(NUM_RANKS, death, body)
    assert set(lived) == set(range(NUM_RANKS)) - set(death)
    model = make_model("")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    members = syncline.load_checkpoint(tmp_path / "run", model, optimizer)
    assert set(members) >= set(lived)
    assert len(optimizer.state) == 4
    first, *others = lived.values()
    assert all(all(map(torch.equal, first, values)) for values in others)


@pytest.mark.parametrize("death", [{2: 1}, {0: 2}, {1: 3}, {0: 3, 3: 2}])
def test_a_job_that_loses_ranks_while_it_resumes_goes_on_from_the_checkpoint(death, tmp_path):
    model = make_model("")
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    syncline.save_checkpoint(tmp_path / "run", model)

    def body(fleet, mortal):
        model = make_model("")
        nn.init.zeros_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)
        with mortal():
            assert syncline.resume(tmp_path / "run", model).path == tmp_path / "run"
        return [parameter.detach().clone() for parameter in model.parameters()]

    lived = run_mortals(NUM_RANKS, death, body)
    assert set(lived) == set(range(NUM_RANKS)) - set(death)
    assert all(all(map(torch.equal, saved, values)) for values in lived.values())


def test_a_loss_while_a_model_is_distributed_is_an_error():
    def body(fleet, mortal):
        model = make_model("")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mortal():
            syncline.distribute(model, optimizer, syncline.AllReduce(), elastic=True, fleet=fleet)

    lived = run_mortals(3, {1: 1}, body)
    assert all(isinstance(error, PeerLostError) for error in lived.values()), lived


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (syncline.Sharded(), True, "take Sharded\\(spares=1\\) or AllReduce"),
        (syncline.Overlapped(), syncline.Elastic(min_ranks=2), "a quorum of its own"),
    ],
)
def test_what_cannot_be_elastic_is_refused(rule, settings, message):
    def body(fleet):
        model = make_model("")
        with pytest.raises(UpdateError, match=message):
            syncline.distribute(model, torch.optim.SGD(model.parameters()), rule, elastic=settings, fleet=fleet)

    run_fleets(1, body)


@pytest.mark.parametrize("rule", [syncline.Overlapped(), syncline.Clustered()])
def test_rules_that_go_on_by_themselves_may_be_asked_to(rule):
    def body(fleet):
        model = make_model("")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = syncline.distribute(model, optimizer, rule, elastic=True, fleet=fleet)
        plain_step(model, optimizer, fleet.rank, 0)
        assert fleet.recovery is None or fleet.recovery._regroup is None, "it does not agree on losses with the others"

    run_fleets(2, body)


def test_models_of_one_job_are_all_elastic_or_none():
    def body(fleet):
        model, other = make_model(""), make_model("")
        first = torch.optim.SGD(model.parameters())
        model, _ = syncline.distribute(model, first, syncline.AllReduce(), elastic=True, fleet=fleet)
        with pytest.raises(UpdateError, match="all models of a job are elastic or none"):
            syncline.distribute(other, torch.optim.SGD(other.parameters()), syncline.AllReduce(), fleet=fleet)
        with pytest.raises(UpdateError, match=r"join\(\) does not go with elastic=True"), syncline.join(model):
            pass
        plain, settings = torch.optim.SGD(other.parameters()), syncline.Elastic(min_ranks=2)
        with pytest.raises(UpdateError, match="have the same settings"):
            syncline.distribute(other, plain, syncline.AllReduce(), elastic=settings, fleet=fleet)

    run_fleets(1, body)


def test_a_job_that_is_not_elastic_has_no_changes():
    def body(fleet):
        model = make_model("")
        optimizer = torch.optim.SGD(model.parameters())
        model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce(), fleet=fleet)
        with pytest.raises(UpdateError, match="only in an elastic job"):
            optimizer.on_membership_change(print)

    run_fleets(1, body)


@pytest.mark.parametrize("value", ["yes", 2])
def test_elastic_is_a_setting(value):
    with pytest.raises(syncline.ConfigurationError, match="must be an Elastic, True or False, or None, not"):
        syncline.Elastic.choose(value)
    with pytest.raises(syncline.ConfigurationError, match="min_ranks"):
        syncline.Elastic(min_ranks=0)
