"""The ranks of a training in a lab, as processes: started, heard and told a line at a time."""

import select
import subprocess
import time
from pathlib import Path

from rank_scripts import forked_python, script_environment

DEADLINE_S = 120.0


def start(lab, program, *arguments, of_hosts=None, of_ranks=None, within=None, **popen):
    """Start a program of this folder for each rank, on its host.

    ``of_hosts`` and ``of_ranks`` are further variables of some; ``within``: the namespaces of ranks that are in others.
    """
    argv = [forked_python(), str(Path(__file__).with_name(program)), *arguments]
    common = {"PYTHONPATH": script_environment()["PYTHONPATH"], "WORLD_SIZE": str(lab.topology.num_ranks)}
    return [
        lab.spawn(
            host.name,
            ["ip", "netns", "exec", within[rank], *argv] if rank in (within or {}) else argv,
            env=common
            | (of_hosts or {}).get(host.name, {})
            | (of_ranks or {}).get(rank, {})
            | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )
        for host in lab.plan.hosts
        for rank in lab.topology.ranks_of(host.name)
    ]


def hear(ranks, expected):
    """Read a line from each rank; it writes a line at a time, so what can be read is a whole one."""
    deadline = time.monotonic() + DEADLINE_S
    for number, rank in enumerate(ranks):
        ready, _, _ = select.select([rank.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {number} did not say {expected!r} within {DEADLINE_S:g} s"
        assert rank.stdout.readline().strip() == expected


def tell(ranks):
    """Let each rank go on."""
    for rank in ranks:
        rank.stdin.write("go on\n")
        rank.stdin.flush()


def carried_between(lab, ranks):
    """Return what each link carries from when the ranks are ready until they are done, and let them end."""
    hear(ranks, "ready")
    before = lab.link_bytes()
    tell(ranks)
    hear(ranks, "done")
    carried = {link: count - before[link] for link, count in lab.link_bytes().items()}
    end(ranks)
    return carried


def trained(ranks):
    """Let the ranks train; return what they then say of their parameters, all the same."""
    hear(ranks, "ready")
    tell(ranks)
    hear(ranks, "done")
    (said,) = set(end(ranks))
    return said


def end(ranks):
    """Let the ranks end, which are done; return what each says at last."""
    tell(ranks)
    said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]  # closes its pipes too
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return said
