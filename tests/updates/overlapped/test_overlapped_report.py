"""What a user is told of an overlapped update: statistics, the line of progress, and the trace."""

import json
from collections import Counter

from overlapped_recording import record
from overlapped_training import one_step, start

from small_regression import make_adam
from syncline.observe import Trace
from syncline.updates import Overlapped
from syncline.updates.overlapped.server_client import OverlappedStatistics
from syncline.updates.overlapped.worker import Send
from thread_fleets import run_fleets

NUM_RANKS, NUM_STEPS, PERIOD = 3, 16, 8


def train(fleet):
    model, optimizer = start(fleet, Overlapped(period=PERIOD, max_staleness=1), make_adam)
    for step in range(NUM_STEPS):
        one_step(model, optimizer, fleet.rank, step)
    told = fleet.statistics(), optimizer.statistics(), optimizer.progress()
    fleet.barrier()  # a rank that leaves is counted
    return told


def test_the_fleet_tells_what_the_update_counted():
    told = run_fleets(NUM_RANKS, train)
    assert any(fleet_counts.waited_s.get("period", 0.0) for fleet_counts, _, _ in told)
    for fleet_counts, counted, progress in told:
        assert fleet_counts.updates == (counted,)
        assert counted.num_steps == NUM_STEPS
        assert counted.num_periods == NUM_STEPS // PERIOD
        assert 0 <= counted.mean_staleness <= counted.max_staleness <= 1
        assert 0 < counted.share_with_global <= 1
        assert len(counted.dropped) == NUM_RANKS
        assert (
            fleet_counts.waited_s.get("period", 0.0) <= counted.waited_period_s
        )  # which counts its own work there too
        assert progress == str(counted)


def test_what_was_pushed_is_in_a_global_gradient_or_counted_as_dropped() -> None:
    """With M < N; what each worker sent and who was in which round is recorded. Messages arrive in a random order."""

    def body(fleet):
        rule = Overlapped(period=PERIOD, quorum=2, max_staleness=2, bucket_bytes=128)
        model, optimizer = start(fleet, rule, make_adam)
        recorder = record(optimizer.training.updater)
        fleet.barrier()  # before anybody's push may be part of a sum
        step = 0
        while optimizer.iteration < 3 * PERIOD:
            one_step(model, optimizer, fleet.rank, step)
            step += 1
        told = optimizer.statistics().dropped
        fleet.barrier()  # a rank that leaves is counted
        return told, recorder

    results = run_fleets(NUM_RANKS, body, seed=2)
    recorders = [recorder for _, recorder in results]
    folds = [note for recorder in recorders for note in recorder.servers if note.what == "fold"]
    inside = Counter(rank for note in folds for rank, _ in note.members)
    for rank, recorder in enumerate(recorders):
        num_pushes = sum(isinstance(told, Send) for step in recorder.steps for _, told in step)
        assert [dropped[rank] for dropped, _ in results] == [num_pushes - inside[rank]] * NUM_RANKS


def test_the_trace_shows_each_part_of_a_step(tmp_path):
    trace = Trace(path=tmp_path / "trace.json")
    results = run_fleets(NUM_RANKS, train, trace=trace)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = Counter(event["name"].split(" of ")[0].split(" into ")[0] for event in events if event["ph"] == "X")
    assert spans["local step"] == NUM_RANKS * NUM_STEPS
    assert spans["period end"] == NUM_RANKS * NUM_STEPS // PERIOD
    num_folds = sum(round(counted.share_with_global * counted.num_steps) for _, counted, _ in results)
    assert spans["fold"] >= num_folds > 0
    assert spans["push"] > 0
    assert spans["pull"] >= num_folds


def test_progress_names_whose_gradients_were_dropped():
    counted = OverlappedStatistics(
        num_steps=40,
        num_periods=2,
        iteration=8,
        mean_staleness=1.25,
        max_staleness=4,
        share_with_global=0.9,
        dropped=(0, 3, 0, 7),
        num_forgotten=0,
        waited_staleness_s=0.0,
        waited_period_s=0.42,
        waited_for={},
        lost=(),
    )
    assert str(counted) == "stale 1.2, at most 4  global 90%  dropped 3 of rank 1, 7 of rank 3  waited 0.0+0.4 s"
