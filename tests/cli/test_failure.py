"""What the user reads when a rank fails."""

import sys

import pytest

from syncline import last_words
from syncline.cli.launcher.failure import (
    describe_failures,
    describe_first,
    describe_restarts,
    fate_of,
    pick_cause,
    traceback_of,
)
from syncline.cli.launcher.supervisor import Exit, Failure
from syncline.errors import DeadlineError, accusing
from syncline.last_words import LAST_WORDS, LastWords

NAMES = {0: "rank 0 (host a1)", 1: "rank 1 (host a1)", 2: "rank 2 (host b1)"}
TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: boom"]


def failure(rank, *, was_signalled=False, **how):
    return Failure(rank=rank, exit=Exit(**how), was_signalled=was_signalled)


def test_the_report_has_rank_host_code_traceback_and_the_others():
    failures = [failure(2, code=1), failure(0, code=1), failure(1, signal_number=15, was_signalled=True)]
    tails = {2: ["a warning", *TRACEBACK], 0: ["syncline.errors.PeerLostError: rank 2 (host b1) is gone"]}
    assert describe_failures(failures, names=NAMES, tails=tails) == [
        "the job failed: rank 2 (host b1), exit code 1",
        *(f"    {line}" for line in TRACEBACK),
        "  then rank 0 (host a1): exit code 1: syncline.errors.PeerLostError: rank 2 (host b1) is gone",
        "  then rank 1 (host a1): ended by the launcher (killed by SIGTERM)",
    ]


def test_those_that_ended_alike_stand_in_one_line():
    names = {rank: f"rank {rank} (host a1)" for rank in range(20)}
    alike = [failure(rank, signal_number=15, was_signalled=True) for rank in range(3, 20)]
    failures = [failure(2, signal_number=9), *(failure(rank, code=1) for rank in (0, 1, 0)), *alike]
    error = "syncline.errors.PeerLostError: rank 2 (host a1) is gone"
    tails = {0: [error], 1: [f"{error} (as rank 0 (host a1) reports)"]}
    assert describe_failures(failures, names=names, tails=tails)[1:] == [
        "  then ranks 0 and 1: exit code 1: syncline.errors.PeerLostError: rank 2 (host a1) is gone",
        "  then ranks 3, 4, 5, 6, 7, 8, 9, 10 and 9 more: ended by the launcher (killed by SIGTERM)",
    ]


def test_a_rank_that_only_lost_its_peer_is_not_the_cause_though_it_ended_first():
    failures = [failure(0, code=1), failure(2, signal_number=9)]
    tails = {0: ["syncline.errors.PeerLostError: rank 2 (host b1) is gone"], 2: []}
    assert pick_cause(failures, tails).rank == 2
    assert pick_cause(failures[:1], tails).rank == 0


def test_whom_the_others_name_stands_first_though_it_was_only_ended_or_ended_well():
    words = {rank: LastWords(ranks=(1,), text="rank 1 (host a1) sent nothing") for rank in (0, 2)}
    tails = {0: ["syncline.errors.DeadlineError: rank 1 (host a1) sent nothing"], 2: ["E: rank 1 (host a1)"]}
    failures = [failure(0, code=1), failure(2, code=1), failure(1, signal_number=15, was_signalled=True)]
    report = describe_failures(failures, names=NAMES, tails=tails, words=words)
    assert report[:2] == [
        "the job failed: rank 1 (host a1), ended by the launcher (killed by SIGTERM)",
        "    rank 0 (host a1) says: rank 1 (host a1) sent nothing",
    ]
    left = describe_failures(failures[:2], names=NAMES, tails=tails, words=words)
    assert left[0] == "the job failed: rank 1 (host a1), which ended with exit code 0"
    own = describe_failures(failures[:2], names=NAMES, tails=tails | {2: TRACEBACK}, words={0: words[0]})
    assert own[0] == "the job failed: rank 2 (host b1), exit code 1", "a rank that failed by itself is the cause"


def test_the_fate_of_an_attempt_names_whom_its_report_names():
    words = {0: LastWords(ranks=(1,), text="rank 1 (host a1) left after 3 steps")}
    tails = {0: ["syncline.errors.DeadlineError: rank 1 (host a1) left after 3 steps"], 1: []}
    told, ended = failure(0, code=1), failure(1, signal_number=15, was_signalled=True)
    assert fate_of([told], names=NAMES, tails=tails, words=words) == "rank 1 (host a1) ended with exit code 0"
    fate = fate_of([told, ended], names=NAMES, tails=tails, words=words)
    assert fate == "rank 1 (host a1) was ended by the launcher (killed by SIGTERM)"
    fate = fate_of([told, failure(2, code=3)], names=NAMES, tails=tails | {2: TRACEBACK}, words=words)
    assert fate == "rank 2 (host b1) ended with exit code 3"


@pytest.mark.parametrize(
    "own",
    [
        "syncline.errors.RendezvousError: rank 0 cannot serve the store at MASTER_ADDR:MASTER_PORT 127.0.0.1:29500: "
        "Address already in use; give all ranks a MASTER_PORT that no other program on rank 0's host uses",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address.",
    ],
)
def test_what_a_rank_could_not_do_itself_is_a_cause_of_whatever_class_it_is(own):
    tails = {0: [own], 2: ["syncline.errors.RendezvousError: The store at MASTER_ADDR:MASTER_PORT cannot be opened"]}
    failures = [failure(2, code=1), failure(0, code=1), failure(1, signal_number=15, was_signalled=True)]
    assert describe_failures(failures, names=NAMES, tails=tails)[0] == "the job failed: rank 0 (host a1), exit code 1"


def test_a_signal_is_explained():
    report = describe_failures([failure(1, signal_number=9)], names=NAMES, tails={})
    assert report == ["the job failed: rank 1 (host a1), killed by SIGKILL (out of memory, or somebody's kill -9)"]
    assert str(Exit(signal_number=35)) == "killed by signal 35", "not all signals have names"


def test_what_a_rank_wrote_before_a_signal_is_not_the_reason():
    tails = {0: ["syncline: rank 4 came in after step 158; 4 ranks go on in epoch 2"]}
    failures = [failure(1, signal_number=9), failure(0, signal_number=9)]
    assert describe_failures(failures, names=NAMES, tails=tails, num_missing=0)[1:] == [
        "  then rank 0 (host a1): killed by SIGKILL (out of memory, or somebody's kill -9)"
    ]


def test_a_job_that_went_on_says_without_how_many():
    report = describe_failures([failure(1, signal_number=9)], names=NAMES, tails={}, num_missing=1)
    assert report[0].startswith("the job went on without 1 of 3 ranks: rank 1 (host a1), killed by SIGKILL")


def test_chained_tracebacks_are_kept_together_and_other_ends_are_short():
    chained = [*TRACEBACK, "", "During handling of the above exception, another exception occurred:", "", *TRACEBACK]
    assert traceback_of(["noise", *chained]) == chained
    assert traceback_of([f"line {k}" for k in range(100)]) == [f"line {k}" for k in range(80, 100)]


def test_the_first_word_says_what_happens_next():
    how = Exit(code=3)
    assert describe_first("rank 1", how, num_living=2, grace_s=5.0) == (
        "rank 1 ended with exit code 3; the other 2 ranks get 5 s to end by themselves"
    )
    would = describe_first("rank 1", how, num_living=2, grace_s=5.0, would_go_on=True)
    assert would.endswith("get 5 s to end by themselves, and would go on with --keep-going or --elastic")
    assert describe_first("rank 1", how, num_living=1, grace_s=5.0).endswith("the other rank gets 5 s to end by itself")
    assert describe_first("rank 1", Exit(signal_number=9), num_living=0, grace_s=5.0) == "rank 1 was killed by SIGKILL"


def test_a_rank_that_came_back_is_not_missing():
    report = describe_failures([failure(1, signal_number=9)], names=NAMES, tails={}, num_missing=0)
    assert report[0].startswith("the job lost ranks, which came back: rank 1 (host a1), killed by SIGKILL")
    words = describe_first("rank 1", Exit(signal_number=9), num_living=2, grace_s=5.0, pause_s=2.0)
    assert words == "rank 1 was killed by SIGKILL; it starts again in 2 s, to join those that go on"


def test_the_summary_has_the_cause_of_each_attempt_that_failed():
    causes = ["rank 1 was killed by SIGKILL", "rank 0 ended with exit code 3"]
    assert describe_restarts(causes, is_success=True, gave_up=None) == (
        "the job ended well when it was started for the third time; before: "
        "1. rank 1 was killed by SIGKILL; 2. rank 0 ended with exit code 3"
    )
    assert describe_restarts(causes, is_success=False, gave_up="once in 60 s") == (
        "no further restart, as --restarts allows it once in 60 s; attempts: "
        "1. rank 1 was killed by SIGKILL; 2. rank 0 ended with exit code 3"
    )


def test_whom_an_error_names_is_left_also_where_foreign_code_raises_its_text_alone(tmp_path, monkeypatch):
    """As DistributedDataParallel does of what a process group's future ended with."""
    path = tmp_path / "words"
    monkeypatch.setenv(LAST_WORDS, str(path))
    text = "rank 1 (host a1) lives, but its training thread has made no call for 2.0 s; look where it is"
    last_words.note(accusing(DeadlineError(text), 1))
    raised = RuntimeError(f"Got the following error when running the callback: DeadlineError: {text}")
    monkeypatch.setattr(sys, "last_value", raised, raising=False)
    last_words._leave()
    assert last_words.read_words(path) == {"ranks": [1], "text": text}


def test_a_rank_that_was_killed_while_it_told_something_has_told_what_it_told_before(tmp_path, monkeypatch):
    path = tmp_path / "words"
    monkeypatch.setenv(LAST_WORDS, str(path))
    assert last_words.read_words(path) == {}
    last_words.tell(met=True, number=3)
    last_words.tell(number=4)
    with path.open("a") as file:
        file.write('{"ranks": [1], "te')
    assert last_words.read_words(path) == {"met": True, "number": 4}
