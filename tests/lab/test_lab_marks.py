"""Whether the doctor sees what a network makes of marks: across a switch, and through a hop that clears them."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from syncline.lab import Lab
from syncline.topology import Topology

DOCTOR = [sys.executable, "-m", "syncline", "doctor"]
RELAY = [sys.executable, str(Path(__file__).parents[1] / "cli" / "bleaching_relay.py")]


@contextmanager
def running(lab, host, command):
    """Start a program on a host, yield the words of its first line, and end it."""
    with lab.spawn(host, command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()
        finally:
            process.kill()


def ask(lab, host, port):
    command = [*DOCTOR, "--path", f"{lab.plan.host(host).address}:{port}", "--json"]
    process = lab.spawn("h0", command, stdout=subprocess.PIPE, text=True)
    found = json.loads(process.communicate(timeout=60)[0])
    return process.returncode, [(one["sent"], one["arrived"], one["returned"]) for one in found["marks"]]


def test_marks_survive_a_switch_and_not_a_hop_that_clears_them():
    with (
        Lab(Topology.flat(3, rate=25e6), priorities=True) as lab,
        running(lab, "h2", [*DOCTOR, "--listen", "--port", "0", "--for", "60"]) as said,
        running(lab, "h1", [*RELAY, lab.plan.host("h2").address, said[3]]) as relay_said,
    ):
        assert ask(lab, "h2", said[3]) == (0, [(mark, mark, mark) for mark in (46, 34, 18, 8)])
        assert ask(lab, "h1", relay_said[0]) == (1, [(mark, 0, 0) for mark in (46, 34, 18, 8)])
