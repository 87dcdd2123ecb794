"""Who holds the others up, from what ranks tell; without ranks, and without time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.fabric.progress import PHASES, Progress
from syncline.runtime.control import ControlError
from syncline.runtime.link_faults import Flow
from syncline.runtime.lookout import Lookout, PaceReport, take_pace
from syncline.runtime.whereabouts import Looks, ThreadWatch
from syncline.topology import Topology

RACKS = Topology.parse(
    "{topology: racks, switch: s, children: [{host: a, uplink: 80 Mbit/s}, {host: b, uplink: 80 Mbit/s}, "
    "{host: c, uplink: 80 Mbit/s}]}"
)
HEALTHY = {"elsewhere": 0.02, "forward": 0.1, "backward": 0.2, "step": 0.1}
"""Parts of each second; the rest is waited."""


def name(rank: int) -> str:
    return f"rank {rank}"


def examine(rank: int, pid: int) -> str:
    return f"process {pid} of rank {rank} is stopped"


def report(seconds: float, own: Mapping[str, float], **changes: object) -> PaceReport:
    told = PaceReport(
        phase="elsewhere",
        is_waiting=False,
        num_calls=int(10 * seconds),
        num_steps=int(seconds),
        total_s=seconds,
        own_s=tuple(own[phase] * seconds for phase in PHASES),
        waited_s=seconds * (1 - sum(own.values())),
        steps_s=seconds,
        flows={},
        pid=7,
    )
    return dataclasses.replace(told, **changes)  # type: ignore[arg-type]


def said_of(own: Mapping[int, Mapping[str, float]], seconds: int = 20, **changes: object) -> list[tuple[float, str]]:
    """What is said when each rank spends its time so, and when."""
    lookout = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0)
    said = []
    for now_s in range(0, seconds + 1, 2):
        for rank, parts in own.items():
            lookout.hear(rank, report(now_s, parts, **changes), now_s)
        said += [(now_s, line) for line in lookout.look(now_s)]
    return said


def healthy(**others: Mapping[str, float]) -> dict[int, Mapping[str, float]]:
    return {0: HEALTHY, 1: HEALTHY, 2: HEALTHY} | {int(key[1:]): parts for key, parts in others.items()}


def test_nothing_is_said_of_a_healthy_job() -> None:
    assert not said_of(healthy())
    a_little = {phase: 1.3 * part for phase, part in HEALTHY.items()}
    assert not said_of(healthy(r1=a_little)), "it costs the others less than is worth a line"


def test_a_slow_processor_is_named_within_fifteen_seconds() -> None:
    ((at_s, line),) = said_of(healthy(r1={phase: 2.2 * part for phase, part in HEALTHY.items()}))
    assert at_s <= 15
    assert line == (
        "rank 1 holds the others up (they wait 58% of the time, and it 8%): it computes slower than they do "
        "(forward 2.2 x, backward 2.2 x, step 2.2 x)"
    )


def test_late_input_is_told_from_slow_computing() -> None:
    ((_, line),) = said_of(healthy(r2=HEALTHY | {"elsewhere": 0.5}))
    assert "rank 2 holds the others up" in line
    assert line.endswith(
        "50% of its time is outside of forward, backward and step, and 2% of theirs; its input is late, or it does "
        "other work there"
    )
    both = {phase: 1.2 * part for phase, part in HEALTHY.items()} | {"elsewhere": 0.2}
    ((_, line),) = said_of(healthy(r2=both))
    assert "and it computes slower (forward 1.2 x" in line
    ((_, line),) = said_of(healthy(r2=both | {"forward": 0.07, "backward": 0.3}))
    assert "and it computes slower (backward 1.5 x, step 1.2 x)" in line, "not in what takes it less time"


def test_a_group_whose_forward_passes_are_not_seen_is_not_said_to_read_its_input() -> None:
    seen = {"elsewhere": 0.2, "forward": 0.0, "backward": 0.1, "step": 0.1}
    ((_, line),) = said_of({0: seen, 1: seen | {"elsewhere": 0.6}})
    assert line.endswith("60% of its time is outside of backward and step, and 20% of theirs")


def test_a_group_that_is_seen_to_compute_more_is_said_to_compute_slower() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(2, 20, 2):
        for rank in range(3):
            own = {"elsewhere": 0.7 if rank == 1 else 0.2, "forward": 0.0, "backward": 0.1, "step": 0.1}
            looks = Looks(num_looks=20 * now_s, num_forward=12 * now_s, num_backward=4 * now_s)
            lookout.hear(rank, report(now_s, own, looks=looks), now_s)
        said += lookout.look(now_s)
    (line,) = said
    assert line.endswith("it computes slower than they do (forward 3.5 x, backward 1.7 x, step 1.0 x)")


def test_one_line_comes_when_that_changes_and_one_when_it_is_over() -> None:
    lookout = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0)
    slow, said, spent = HEALTHY | {"forward": 0.5}, [], {0: [0.0] * 4, 1: [0.0] * 4, 2: [0.0] * 4}
    for now_s in range(2, 80, 2):
        for rank, own_s in spent.items():
            parts = slow if (rank, now_s < 40) == (1, True) else HEALTHY
            own_s[:] = [so_far + 2 * parts[phase] for so_far, phase in zip(own_s, PHASES, strict=True)]
            told = report(now_s, HEALTHY, own_s=tuple(own_s), waited_s=now_s - sum(own_s))
            lookout.hear(rank, told, now_s)
        said += lookout.look(now_s)
    assert [line[:15] for line in said] == ["rank 1 holds th", "rank 1 holds no"]


def said_of_flows(
    flows: Mapping[tuple[int, int], tuple[float, float, float]], *, waited: float = 0.6, topology: Topology = RACKS
) -> list[str]:
    """What is said where all ranks wait, and these are the bytes sent, lost and the time busy of each second."""
    lookout, said = Lookout(topology, name, examine, behind_s=60.0, now_s=0.0), []
    own = dict.fromkeys(PHASES, (1 - waited) / 4)
    for now_s in range(0, 20, 2):
        for rank in range(topology.num_ranks):
            sent = {
                peer: Flow(*(now_s * one for one in flow)) for (source, peer), flow in flows.items() if source == rank
            }
            lookout.hear(rank, report(now_s, own, flows=sent), now_s)
        said += lookout.look(now_s)
    return said


def test_a_full_link_is_named_where_no_rank_is_slow() -> None:
    assert said_of_flows({(1, 0): (5e6, 0, 0.6), (1, 2): (4e6, 0, 0.6)}) == [
        "the link of b holds the ranks up: 90% of 80 Mbit/s is used (b up), and they wait 60% of the time"
    ]
    lossy = said_of_flows({(1, 0): (5e6, 2e5, 0.6), (1, 2): (4e6, 2e5, 0.6)})
    assert "is used (b up), 4% of what is sent there is lost, and they wait" in lossy[0]


def test_after_a_minute_without_a_step_it_is_said_who_is_behind_and_where() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(0, 200, 2):
        for rank in range(3):
            is_waiting = rank != 1
            lookout.hear(rank, report(3, HEALTHY, phase="backward", is_waiting=is_waiting, num_calls=7 + rank), now_s)
        said += lookout.look(now_s)
    assert said == [f"no step was finished for {s} s: rank 1 is behind, in backward; 2 wait" for s in (60, 120)]


def test_a_rank_that_is_silent_and_ranks_that_all_wait_are_told_as_they_are() -> None:
    lookout = Lookout(RACKS, name, examine, behind_s=20.0, now_s=0.0)
    waiting = report(3, HEALTHY, is_waiting=True)
    for rank in range(3):
        lookout.hear(rank, waiting, 0.0)
    assert lookout.look(20.0) == ["no step was finished for 20 s: all 3 ranks wait"]
    lookout = Lookout(RACKS, name, examine, behind_s=20.0, now_s=0.0)
    lookout.hear(0, waiting, 0.0)
    lookout.hear(1, report(3, HEALTHY), 0.0)
    lookout.hear(0, waiting, 20.0)
    silent = "rank 1 has told nothing for 20 s, and was outside of forward, backward and step before"
    stopped = "process 7 of rank 1 is stopped"
    assert lookout.look(20.0) == [f"no step was finished for 20 s: {silent}; {stopped}; 1 wait"]


def test_long_work_for_which_nobody_waits_is_no_trouble() -> None:
    assert not said_of(healthy(), seconds=300, num_steps=3)


def test_a_report_travels_and_nonsense_is_refused() -> None:
    progress = Progress()
    with progress.stepping(0):
        pass
    with progress.storing():
        assert progress.stored_until_now_s > 0
    progress.loss, progress.num_samples = 0.5, 32
    first = SimpleNamespace(peer=1, sent_bytes=5, lost_bytes=3, busy_s=0.25)
    second = SimpleNamespace(peer=1, sent_bytes=2, lost_bytes=0, busy_s=0.125)
    counted: Any = SimpleNamespace(fabric=SimpleNamespace(rank=0, connections=[first, second]))
    watch = ThreadWatch(progress)
    watch.look()
    told = take_pace(progress, counted, watch)
    assert (told.num_steps, told.loss, told.num_samples) == (1, 0.5, 32)
    assert told.flows == {1: Flow(7, 3, 0.25)}, "connections to one peer are busy together"
    assert told.stored_s == progress.stored_s > 0
    assert told.pid == os.getpid()
    assert "test_a_report_travels" in told.place
    assert (told.num_at_place, told.looks.num_looks, told.looks.num_apart) == (1, 1, 1)
    assert PaceReport.decode(told.encode(), 3) == told
    for nonsense in (b"", told.encode()[:-1], b"\x09" + told.encode()[1:]):
        with pytest.raises(ControlError, match="of its pace"):
            PaceReport.decode(nonsense, 3)
    with pytest.raises(ControlError, match="of its pace"):
        PaceReport.decode(told.encode(), 1)


def test_before_its_first_step_no_rank_is_named_and_it_is_said_to_start() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(0, 62, 2):
        for rank in range(3):
            if rank != 1 or now_s == 0:  # it imports, and meanwhile its interpreter is held
                lookout.hear(rank, report(0, HEALTHY, is_waiting=rank != 1, phase="elsewhere"), now_s)
        said += lookout.look(now_s)
    (line,) = said
    assert line.startswith("no step was finished for 60 s: rank 1 has told nothing for 60 s, and was before its first")
    assert [one["phase"] for one in lookout.view(62.0)["ranks"]] == ["starting"] * 3


def test_what_a_rank_did_before_its_first_step_accuses_it_of_nothing() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(0, 20, 2):
        for rank in range(3):
            started = 9.0 if rank == 1 else 0.5
            made_s = max(0.0, now_s - 9)
            own_s = tuple(made_s * HEALTHY[phase] + (phase == "elsewhere") * min(started, now_s) for phase in PHASES)
            told = report(now_s, HEALTHY, own_s=own_s, waited_s=now_s - sum(own_s), num_steps=int(2 * made_s))
            lookout.hear(rank, told, now_s)
        said += lookout.look(now_s)
    assert not said


def test_a_slow_disk_is_told_by_seconds_in_checkpoints_and_by_what_the_kernel_says_of_the_thread() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(2, 20, 2):
        for rank in range(3):
            is_slow, own = rank == 2, HEALTHY | {"elsewhere": 0.5 if rank == 2 else 0.02}
            looks = Looks(num_looks=4 * now_s, num_on_device=3 * now_s * is_slow)
            told = report(now_s, own, place="in save (a.py:7)" * is_slow, num_at_place=8 * is_slow, looks=looks)
            lookout.hear(rank, dataclasses.replace(told, stored_s=now_s * (0.46 if is_slow else 0.01)), now_s)
        said += lookout.look(now_s)
    (line,) = said
    assert line.endswith(
        "at 32 of 32 looks it was in save (a.py:7); for 46% of the time it wrote a checkpoint to its disk, 1% of "
        "theirs; at 24 of 32 looks it waited for a disk or another device"
    )


def test_a_view_has_what_is_known_now_and_none_for_what_is_not() -> None:
    lookout = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0)
    assert lookout.view(1.0) == {"seconds": 1.0, "ranks": [], "links": [], "said": []}
    for now_s in range(0, 21, 2):
        moved = {2: Flow(3e6 * now_s, 0, 0.0)}  # of 10 MB/s, by two ranks
        for rank in range(2):
            told = report(now_s, HEALTHY, flows=moved, num_samples=32 * now_s * rank, loss=0.5 if rank else math.nan)
            lookout.hear(rank, told, now_s)
    view = lookout.view(22.0)
    assert json.loads(json.dumps(view)) == view
    assert view["links"][0] == {"link": "c down", "rate": 1e7, "use": pytest.approx(0.6), "lost": 0.0}
    first, second = view["ranks"]
    assert (first["steps"], first["steps_per_s"], first["silent_s"]) == (20, pytest.approx(1.0), 2.0)
    assert (first["samples_per_s"], first["loss"]) == (None, None)
    assert (second["samples_per_s"], second["loss"]) == (pytest.approx(32.0), 0.5)
    assert first["waited"] == pytest.approx(0.58)


def test_a_lack_of_processors_is_said_where_it_explains_half_of_the_cost() -> None:
    slow = {**HEALTHY, "forward": 0.3, "backward": 0.4}
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(0, 21, 2):
        for rank in range(3):
            lacked_s = now_s * (0.45 if rank == 1 else 0.03)
            lookout.hear(rank, report(now_s, slow if rank == 1 else HEALTHY, lacked_s=lacked_s), now_s)
        said += lookout.look(now_s)
    (line,) = said
    assert line.endswith("for 45% of the time one of its threads was ready and had no processor, 3% of theirs")


def test_a_rank_that_tells_nothing_is_said_to_be_silent_and_not_slow() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(0, 40, 2):
        for rank in range(3):
            if rank != 1 or now_s <= 20:
                waits = now_s - (now_s - 20) * (now_s > 20) * 0.9
                lookout.hear(
                    rank, report(now_s, {phase: part * waits / max(now_s, 1) for phase, part in HEALTHY.items()}), now_s
                )
        said += [(now_s, line) for line in lookout.look(now_s)]
    ((at_s, line),) = said
    assert at_s <= 20 + 15
    assert line.startswith("rank 1 has told nothing for")
    assert line.endswith("and was outside of forward, backward and step before; process 7 of rank 1 is stopped")
    assert lookout.last_heard(1, 40.0) == (20.0, 7)
    lookout.forget(1)
    assert lookout.last_heard(1, 40.0) == (None, 0)


def test_links_that_lose_what_is_sent_are_named_with_the_part() -> None:
    flows = {(1, 0): (1e5, 5e3, 0.5), (1, 2): (1e5, 5e3, 0.5), (0, 2): (1e5, 0, 0.1), (2, 0): (1e5, 0, 0.1)}
    (line,) = said_of_flows(flows)
    assert line == (
        "the link of b holds the ranks up: 5.0% of what is sent there is lost, and sent again (b up); messages were "
        "under way there (b up) for 50% of the time, at 3.2 Mbit/s of 80 Mbit/s; they wait 60% of the time"
    )
    (line,) = said_of_flows({(1, 0): (1e5, 5e3, 0.5), (0, 2): (1e5, 0, 0.1)})
    assert line.startswith("the links of a and b hold the ranks up"), "which of both is not known"


SLOW, QUICK = (4e5, 0, 0.85), (4e5, 0, 0.05)
"""Flows of 3.8 and 64 Mbit/s while they are busy."""


def test_a_link_is_named_that_is_far_below_its_rate_while_ranks_wait_and_others_are_not() -> None:
    flows = {(0, 1): SLOW, (0, 2): SLOW, (1, 2): QUICK, (2, 1): QUICK}
    (line,) = said_of_flows(flows, waited=0.8)
    assert line == (
        "the link of a holds the ranks up: messages were under way there (a up) for 85% of the time, at 7.529 Mbit/s "
        "of 80 Mbit/s; they wait 80% of the time"
    )
    (line,) = said_of_flows({**flows, (1, 0): SLOW, (2, 0): SLOW}, waited=0.8)
    assert line.startswith("the link of a holds the ranks up: messages were under way there (a up, a down) for 85%")


@pytest.mark.parametrize(
    "others",
    [
        {(1, 2): SLOW, (2, 1): SLOW},  # processors are busy: all is slow
        {(0, 1): QUICK, (1, 2): QUICK},  # what is slow is not the link of a
        {},  # nothing to compare it with
        {(0, 1): (3e6, 0, 0.85), (1, 2): QUICK},  # it carries much
    ],
)
def test_no_link_is_named_where_others_are_as_slow_or_a_flow_across_it_is_not(others: Mapping[Any, Any]) -> None:
    assert not said_of_flows({(0, 2): SLOW, **others}, waited=0.8)


def test_no_link_is_named_for_less_than_the_ranks_wait() -> None:
    assert not said_of_flows({(0, 1): (1e5, 0, 0.3), (1, 2): QUICK}, waited=0.8)


def test_a_path_is_named_by_the_link_that_all_slow_flows_cross() -> None:
    two = Topology.parse(
        "{switch: s, children: [{switch: r, uplink: 80 Mbit/s, children: [{host: 'h[0-1]', uplink: 80 Mbit/s}]}, "
        "{host: 'h[2-3]', uplink: 80 Mbit/s}]}"
    )
    flows = {(0, 2): SLOW, (1, 3): SLOW, (0, 1): QUICK, (1, 0): QUICK, (2, 3): QUICK, (3, 2): QUICK}
    (line,) = said_of_flows(flows, waited=0.8, topology=two)
    assert line.startswith("the link of r holds the ranks up: messages were under way there (r up) for 85%")


def test_a_link_keeps_its_name_while_it_is_among_those_that_may_be_at_fault() -> None:
    lookout, said, sent = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), [], 0.0
    lossy = {"both": {(1, 0): 5e3}, "one": {(1, 0): 5e3, (1, 2): 5e3}, "other": {(1, 0): 5e3, (2, 0): 5e3}, "none": {}}
    lost = dict.fromkeys([(1, 0), (1, 2), (2, 0)], 0.0)
    for now_s in range(0, 120, 2):
        kind = ("one", "both", "other", "none")[min(now_s // 30, 3)]
        sent += 2e5
        for pair in lost:
            lost[pair] += 2 * lossy[kind].get(pair, 0.0)
        for rank in range(3):
            flows = {peer: Flow(sent, lost[source, peer], 0.0) for source, peer in lost if source == rank}
            lookout.hear(rank, report(now_s, dict.fromkeys(PHASES, 0.1), flows=flows), now_s)
        said += [line[:30] for line in lookout.look(now_s)]
    assert said == [
        f"the link of {line}" for line in ("b holds the ranks ", "a holds the ranks ", "a holds nobody up ")
    ]


def test_a_full_link_is_said_again_when_it_loses_what_is_sent() -> None:
    lookout, said, sent, lost = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), [], 0.0, 0.0
    for now_s in range(0, 90, 2):
        sent, lost = sent + 2 * 8e6, lost + (2 * 4e5 if 30 <= now_s < 60 else 0.0)
        for rank in range(3):
            flows = {0: Flow(sent, lost, 0.9 * now_s)} if rank == 1 else {}
            lookout.hear(rank, report(now_s, dict.fromkeys(PHASES, 0.1), flows=flows), now_s)
        said += [(now_s, line) for line in lookout.look(now_s)]
    (_, full), (since_s, lossy) = said
    used = "the link of b holds the ranks up: 80% of 80 Mbit/s is used (b up)"
    assert full == f"{used}, and they wait 60% of the time"
    assert 30 <= since_s <= 40
    assert lossy == f"{used}, 2% of what is sent there is lost, and they wait 60% of the time"


def test_a_slow_link_is_named_where_faster_paths_are_limited_by_processors() -> None:
    """The link of h0 gives 30 Mbit/s, rack r's 95 of 100, and hosts of 1 Gbit/s 300, as processors let them."""
    racks = Topology.parse(
        "{switch: s, children: [{switch: r, uplink: 100 Mbit/s, children: [{host: 'h[0-1]', uplink: 1 Gbit/s}]}, "
        "{host: 'h[2-3]', uplink: 1 Gbit/s}]}"
    )
    mbit_per_s = {(3, 0): 30, (1, 2): 95, (2, 3): 300, (0, 1): 300}
    flows = {pair: (3e6, 0, 3e6 / (125e3 * rate)) for pair, rate in mbit_per_s.items()}
    (line,) = said_of_flows(flows, waited=0.8, topology=racks)
    assert line.startswith("the links of h0 and h3 hold the ranks up: messages were under way there (h0 down, h3 up)")


def test_where_a_late_rank_was_seen_and_that_it_swaps_are_told() -> None:
    lookout, said = Lookout(RACKS, name, examine, behind_s=60.0, now_s=0.0), []
    for now_s in range(0, 20, 2):
        for rank in range(3):
            is_slow = rank == 2
            own = HEALTHY | {"elsewhere": 0.5} if is_slow else HEALTHY
            told = report(now_s, own, place="in load (a.py:7)" * is_slow, num_faults=100 * now_s * is_slow)
            told = dataclasses.replace(told, num_at_place=3 * is_slow, looks=Looks(num_looks=2 * now_s))
            lookout.hear(rank, told, now_s)
        said += lookout.look(now_s)
    (line,) = said
    assert (
        "at 12 of 16 looks it was in load (a.py:7); 100 times a second it waited for memory that is on a disk" in line
    )
