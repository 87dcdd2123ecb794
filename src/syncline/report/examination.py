"""What the ranks of a running job answered, when they were asked what they do: who is in which call, and who is not.

In a stream of calls all ranks make the same ones in the same order, so numbers tell who is behind: a rank whose last
call there is before the one in which others are has not begun it. Nothing is said of calls that are young.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import ConfigurationError, name_ranks
from syncline.observe import align_events
from syncline.report.job_trace import JobTrace, build_job_trace

LEAST_OPEN_S = 1.0
"""Calls that began later are as they should be, as far as one look can tell."""
MOST_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What one rank answered."""

    rank: int
    name: str
    pid: int
    phase: str
    is_waiting: bool
    steps: int
    calls: Sequence[Mapping[str, Any]]
    """The last call of each stream."""
    thread: str
    """That of the training."""
    stacks: Mapping[str, Sequence[str]]
    """Of each thread, the innermost call first."""

    @property
    def where(self) -> str:
        """Where its training thread is, in a word or two."""
        return "waits in " * self.is_waiting + self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was learnt of a running job."""

    job: JobTrace
    """Of the seconds in which the ranks recorded."""
    ranks: tuple[RankAnswer, ...]
    absent: tuple[Mapping[str, Any], ...]
    """Those that did not answer, with what rank 0 knows of them."""

    def held(self) -> dict[str, frozenset[int]]:
        """Return a sentence for what ranks are in for long, the first of its calls, and the ranks that it waits for."""
        by_stream: dict[tuple[tuple[int, ...], int], dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for one in self.ranks:
            for call in one.calls:
                by_stream[tuple(call["members"]), call["stream"]][one.rank] = call
        found: dict[object, tuple[str, frozenset[int]]] = {}
        for (members, _), calls in by_stream.items():
            for within, sentence, awaited in self._held_in(members, calls):
                found.setdefault((within, awaited), (sentence, awaited))
        return dict(found.values())

    def _held_in(
        self, members: Sequence[int], calls: Mapping[int, Mapping[str, Any]]
    ) -> Iterator[tuple[frozenset[int], str, frozenset[int]]]:
        is_open = {rank: call for rank, call in calls.items() if not call["is_over"]}
        if not is_open:
            return
        place = min(call["place"] for call in is_open.values())
        within = {rank: call for rank, call in is_open.items() if call["place"] == place}
        oldest = max(within.values(), key=lambda call: call["seconds"])
        if oldest["seconds"] < LEAST_OPEN_S:
            return
        answered = {one.rank: one for one in self.ranks}
        behind = [rank for rank in members if rank in answered and calls.get(rank, {"place": 0})["place"] < place]
        silent = [rank for rank in members if rank not in answered]
        through = [rank for rank, call in calls.items() if rank not in within and rank not in behind]
        verb = "are" if len(within) > 1 else "is"
        parts = [f"{name_ranks(within)} {verb} in {oldest['what']} since {oldest['seconds']:.0f} s"]
        parts += [f"{answered[rank].name} has not begun it: {answered[rank].where}" for rank in behind]
        if silent:
            parts.append(f"{name_ranks(silent)} {'give' if len(silent) > 1 else 'gives'} no answer")
        if through:
            parts.append(f"{name_ranks(through)} {'are' if len(through) > 1 else 'is'} through")
        if len(within) == len(members):
            parts.append("all of its ranks have begun it, so what is missing is under way between them")
        yield frozenset(within), "; ".join(parts) + ".", frozenset((*behind, *silent))


def read_examination(told: Mapping[str, Any]) -> Examination:
    """Read what the port of rank 0 says; :class:`ConfigurationError` for what it cannot say.

    >>> read_examination({"answers": {}, "absent": []}).ranks
    ()
    """
    try:
        answers = [_read_answer(text) for _, text in sorted(told["answers"].items(), key=lambda item: int(item[0]))]
        job = build_job_trace(align_events(answer.pop("events") for answer in answers))
        ranks = tuple(RankAnswer(**answer) for answer in answers)
        return Examination(job=job, ranks=ranks, absent=tuple(told["absent"]))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ConfigurationError(
            f"what the job answers cannot be read ({error}); ask with the version of Syncline that it runs"
        ) from error


def _read_answer(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompressobj().decompress(base64.b64decode(text), MOST_ANSWER_BYTES))
    return found
