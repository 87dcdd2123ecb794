"""Each kind of fault once, on four real ranks in the lab, and the oracle on what came of it; more: make soak.

`docs/faults.md` says which kinds there are, what is right after each, and where more of it is tested.
"""

import pytest
from soak_job import Job
from soak_kinds import KINDS
from soak_oracle import invalid
from soak_plan import GROWING, plan_one

LIMIT_S = 120.0
"""Without any event for so long, a job hangs, also on a busy machine."""
SYNCHRONOUS = [(kind, ("allreduce", "sharded")[number % 2]) for number, kind in enumerate(KINDS)]
TOLERANT = [
    ("link-cut", "overlapped"),
    ("reset", "overlapped"),
    ("bit-flip", "overlapped"),
    ("stopped-briefly", "overlapped"),
    ("rack-cut", "clustered"),
    ("black-hole", "clustered"),
    ("closed-in-a-frame", "clustered"),
    ("link-cut-briefly", "clustered"),
]
ELASTIC = [(kind, "allreduce-elastic") for kind in ("killed", "link-cut", "reset", "bit-flip", "rack-cut")]
SPARED = [(kind, "sharded-elastic") for kind in ("killed", "stopped", "reset")]
PAIRED = [(kind, "phase") for kind in ("killed", "exception", "reset", "bit-flip", "link-cut", "stopped-briefly")]
GROUP = [("reset", "group"), ("bit-flip", "group"), ("link-cut-briefly", "group"), ("hung", "group")]


@pytest.mark.parametrize(("kind", "rule"), [*SYNCHRONOUS, *TOLERANT, *ELASTIC, *SPARED, *PAIRED, *GROUP])
def test_a_job_ends_as_it_may(kind, rule, network, forker, oracle, tmp_path):
    plan = plan_one(kind, rule, seed=1)
    record = Job(plan, network, forker, tmp_path / "job").run(limit_s=LIMIT_S)
    assert invalid(record) is None
    assert not oracle.judge(record), f"{plan}: {record.injected}"


@pytest.mark.parametrize("kind", ["killed", "stopped", "reset"])
def test_another_comes_for_whoever_is_lost(kind, network, forker, oracle, tmp_path):
    plan = plan_one(kind, GROWING, seed=1, num_steps=900)  # more than are made while a newcomer starts
    record = Job(plan, network, forker, tmp_path / "job").run(limit_s=LIMIT_S)
    assert not oracle.judge(record), f"{plan}: {record.injected}"
    assert [bool(record.of(rank, "done")) for rank in record.newcomers] == [True] * (kind != "reset")
