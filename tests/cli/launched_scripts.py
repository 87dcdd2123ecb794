"""Tiny scripts without torch as the ranks of a job that this process launches."""

import io
import sys
import textwrap

from syncline.cli.launcher.launch import Request, launch
from syncline.cli.launcher.supervisor import Limits
from syncline.cli.launcher.terminal import Terminal

QUICK = Limits(grace_s=0.3, stubborn_s=0.3, interrupt_s=5.0)
TWO_HOSTS = """
topology: two-hosts
switch: core
children:
  - {host: a1, uplink: 1 Gbit/s, ranks: 1}
  - {host: b1, uplink: 1 Gbit/s, ranks: 2}
"""
KNOWN = """
import json, os, signal, sys
rank, attempt = int(os.environ.get("RANK", "-1")), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def tell(**words):  # as syncline.last_words does
    with open(os.environ["SYNCLINE_LAST_WORDS"], "a") as file:
        file.write(json.dumps(words) + chr(10))


tell(doors=[f"own:{rank}"])
"""


def start(script, *, limits=QUICK, **said):
    """Run ``script``, which knows ``rank`` and ``attempt``, and can ``tell``; returns exit code, output and error."""
    out, error = io.StringIO(), io.StringIO()
    said = said if "topology" in said else {"num_ranks": 2} | said
    command = (sys.executable, "-S", "-c", KNOWN + textwrap.dedent(script))
    code = launch(Request(command=command, limits=limits, **said), terminal=Terminal(stdout=out, stderr=error))
    return code, out.getvalue(), error.getvalue()
