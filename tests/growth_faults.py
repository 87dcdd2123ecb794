"""What may go wrong where a job lets newcomers in, for processes that are one of its ranks, by the JSON of a plan.

``die``: at which of :data:`PLACES` a process, by its number, is killed; where ranks meet, once all have begun to: who
hears of a loss before it knows of the switch makes none. ``miss``: who holds the others lost once all have met.
(``meeting_port``: of a store that tells either.) ``together``: so many newcomers, at least, come in at once.
``members`` are there at the start; the others, a number each in ``come``, are newcomers.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import syncline
from syncline.errors import PeerLostError
from syncline.pytorch.epochs import FleetGrowth
from syncline.pytorch.growing_training import GrowingTraining
from syncline.runtime.joining.server import JoinServer
from syncline.updates.elastic_sharded import ElasticShardedUpdater

PLACES = {
    "give": (GrowingTraining, "give"),
    "take": (GrowingTraining, "take"),
    "resume": (GrowingTraining, "resume"),
    "admit": (ElasticShardedUpdater, "_agree_on_step"),
    "admitted": (ElasticShardedUpdater, "_gather_anew"),
}
"""Where in a switch a process may die, beside "meet": at the beginning of a method."""


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the process trains on in a step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return (
        torch.randn(4, 6, generator=generator, dtype=torch.float64),
        torch.randn(4, 3, generator=generator, dtype=torch.float64),
    )


def _die_in(place: str) -> None:
    owner, name = PLACES[place]
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def _watch_meeting(plan: dict[str, Any], own: int) -> None:
    """Let this process tell the store where it meets the others; there be killed, or miss them, if the plan says so.

    Who misses the others holds them lost once all have met, as if their last message had not come.
    """
    meet, store = FleetGrowth._meet, TCPStore("127.0.0.1", plan["meeting_port"], wait_for_workers=False)
    number, place = plan["members"] + plan.get("together", 1), plan.get("die", {}).get(str(own))

    def arrive(what: str, *, waits: bool) -> None:
        if store.add(what, 1) == number:
            store.set(f"all {what}", "")
        if waits:
            store.wait([f"all {what}"])

    def watched(self: FleetGrowth, *arguments: Any) -> None:
        arrive("begin", waits=place == "meet")
        if place == "meet":
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self, *arguments)
        arrive("have met", waits=own in plan.get("miss", ()))
        if own in plan.get("miss", ()):
            raise PeerLostError("the others do not answer", rank=0, host="h0")

    FleetGrowth._meet = watched  # type: ignore[method-assign]


def _gather(number: int) -> None:
    """Let nobody in before so many newcomers can be let in together."""
    look = JoinServer._look

    def wait(self: JoinServer) -> None:
        if sum(asker.is_ready for asker in self._askers) >= number:
            look(self)

    JoinServer._look = wait  # type: ignore[method-assign]


def count_switches() -> list[int]:
    """Return what grows by one with each switch that this process begins."""
    switch, begun = FleetGrowth._switch, [0]

    def count(self: FleetGrowth, *arguments: Any) -> None:
        begun[0] += 1
        switch(self, *arguments)

    FleetGrowth._switch = count  # type: ignore[method-assign]
    return begun


def open_door(folder: Path, waiting: dict[str, int], fleet: syncline.Fleet, step: int, begun: int) -> None:
    """Write where to ask into the pipes of newcomers that wait for this step, or (0) for a switch to have begun."""
    for newcomer in [each for each, after in waiting.items() if (step >= after if after else begun)]:
        (folder / f"come-{newcomer}").write_text(str(fleet.join_address))
        del waiting[newcomer]


def prepare(plan: dict[str, Any], own: int) -> None:
    """Let process ``own`` do what the plan says of it."""
    gc.disable()  # it may come much later than the next step
    torch.set_num_threads(1)
    place = plan.get("die", {}).get(str(own), "meet")
    if place != "meet":
        _die_in(place)
    if "meeting_port" in plan:
        _watch_meeting(plan, own)
    _gather(plan.get("together", 1))


def start(folder: Path, plan: dict[str, Any], own: int) -> syncline.Fleet:
    """Begin as a member, or as a newcomer once a pipe of the folder says where to ask."""
    if own < plan["members"]:
        return syncline.init(rank=own, world_size=plan["members"])
    return syncline.init(join=(folder / f"come-{own}").read_text())  # a pipe
