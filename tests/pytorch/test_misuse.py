"""Each parameter of each public call is given wrong values: an error says which, and what is asked for, or it is right.

The calls are those of the reference, so that a new name without a right call in :mod:`misuse_calls` fails.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from misuse_calls import CALLS, NOT_CALLED, World
from reference_names import REFERENCE
from syncline.errors import SynclineError

WRONG: tuple[Any, ...] = ("x", "", 3, -1, math.nan, None, object(), [], {}, bool)
NUMBER = r"\b(int|float|Count|Whole|Share|Seconds|Bounds|Portions)\b"
FITS = (
    (str, r"\bstr\b"),
    (int, NUMBER),
    (type(None), r"\bNone\b"),
    (list, r"\b(Sequence|Iterable)\b"),
    (dict, r"\b(Mapping|Iterable|Weights|Fractions|Gradients)\b"),
    (type, r"\b(Callable|CountSamples|Loss)\b"),
)
"""Where an annotation names the kind of a value, that is not wrong by its kind."""
NEEDS = {"syncline.phase": "so their number is even"}
"""Calls that are not right in a job of one rank, and what they say."""
TRUTH = "any truth value counts, as with torch; "
ACCEPTED: dict[str, str] = {
    "syncline.Sharded(replicate)": "names, levels and ranks are judged by distribute(), where the topology is known",
    "syncline.LocalSteps(parties)": "parts of the topology are judged where that is known",
    "syncline.Clustered(clusters)": "a number of clusters, or those of each rank, are judged where the ranks are known",
    "syncline.data.sampler(dataset='x')": "a text has a length, and samples that can be counted",
    "syncline.data.ElasticSampler(dataset='x')": "likewise",
    "syncline.note(loss)": "any number is a loss, and one that is not finite must not end the job",
    "syncline.Fleet.close(is_failing)": TRUTH + "closing must not fail",
    "syncline.DistributedOptimizer.zero_grad(set_to_none)": TRUTH + "it is called in every step",
}
"""What is accepted though its annotation does not name it, and why."""


def calls() -> Iterator[tuple[str, Any]]:
    """Yield the name of everything in the reference that takes arguments: functions, classes, and their members."""
    for name, value in REFERENCE.items():
        if not inspect.isclass(value):
            yield name, value
        elif not issubclass(value, BaseException | str):
            if not getattr(value, "_is_protocol", False):
                yield name, value
            for base in reversed([base for base in value.__mro__ if base.__module__.startswith("syncline")]):
                for key in vars(base):
                    if not key.startswith("_") and callable(getattr(value, key)):
                        yield f"{name}.{key}", getattr(value, key)


def parameters_of(call: Any) -> dict[str, str]:
    """Return the annotation of each parameter that a user names."""
    found = inspect.signature(call).parameters.values()
    return {one.name: str(one.annotation) for one in found if one.name != "self" and one.kind is not one.VAR_KEYWORD}


NAMES = {name: parameters_of(call) for name, call in calls() if parameters_of(call)}


def test_each_public_call_is_tried() -> None:
    tried = {name for name in NAMES if name in CALLS}
    left = {name for name in NAMES if name not in CALLS and not {name, name.rpartition(".")[0]} & NOT_CALLED.keys()}
    assert not left, "give each a right call in misuse_calls.py, or say there why users do not call it"
    assert CALLS.keys() == tried, "these take no arguments, or are no public names"


def is_accepted(call: str, parameter: str, annotation: str, value: object) -> bool:
    fits = any(isinstance(value, kind) and re.search(text, annotation) for kind, text in FITS)
    is_known = {f"{call}({parameter})", f"{call}({parameter}={value!r})"} & ACCEPTED.keys()
    return fits or bool(is_known) or re.match(r"(Any|object)\b", annotation) is not None


def outcome(name: str, changed: dict[str, Any]) -> Exception | None:
    """Make a call that is right but for what is changed; return what it raised."""
    with World() as world:
        call, given = CALLS[name](world)
        try:
            call(**{**given, **changed})
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_refused_in_our_words(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("syncline.cli.launcher.function._run", lambda _: 0)
    right = outcome(name, {})
    assert right is None or NEEDS.get(name, "nothing") in str(right)
    wrong = []
    for parameter, annotation in NAMES[name].items():
        for value in WRONG:
            error = outcome(name, {parameter: value})
            if error is None or str(error) == str(right):
                is_told = is_accepted(name, parameter, annotation, value)
            else:
                says_which = parameter in str(error) or repr(value) in str(error) or value in ("", [], {})
                is_told = isinstance(error, SynclineError) and says_which
            if not is_told:
                wrong.append(f"{parameter}={value!r} ({annotation}): {error!r}")
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.parametrize(
    "value", [one for one in WRONG if one is not None and not isinstance(one, int)], ids=lambda one: type(one).__name__
)
def test_a_work_waits_for_seconds(value: Any) -> None:
    with World() as world:
        work = world.fleet.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(SynclineError, match="timeout_s must be a number of seconds, or None, not"):
            work.wait(value)
        work.wait()
