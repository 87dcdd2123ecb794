"""Forks ranks from one process that has imported torch already: read a job from each line, answer with its statuses.

A rank runs its script as ``python SCRIPT ARGUMENTS`` would, and ends as an interpreter ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import torch

import syncline


def warm_up() -> None:
    """Import what torch and we import when it is first used."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    assert syncline.init is not None
    assert syncline.distribute is not None


def be_rank(job: dict[str, Any], rank: int) -> None:
    """Become a rank; what it writes goes to its file."""
    os.environ.clear()
    os.environ.update(job["environments"][rank])
    output = os.open(job["outputs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = os.path.dirname(job["script"])  # noqa: PTH120 - a string, as python sets it
    runpy.run_path(job["script"], run_name="__main__")


def main() -> None:
    """Serve until nobody asks any more."""
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        processes = []
        for rank in range(len(job["outputs"])):
            process = os.fork()
            if process == 0:
                be_rank(job, rank)
                return
            processes.append(process)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
