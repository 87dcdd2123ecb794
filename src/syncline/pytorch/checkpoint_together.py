"""What all ranks do together in saving or loading: each its part, and all fail if one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pickle import PickleError
from typing import Any

from syncline.errors import CheckpointError, SynclineError, name_ranks


class Together:
    """Lets all ranks do a thing in the user's ``call``, and all fail if one does; ``exchange`` is how they tell."""

    def __init__(self, exchange: Callable[[Any, str], list[Any]], target: Path, call: str) -> None:
        self._exchange = exchange
        self._target = target
        self._call = call

    def run(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Return what each rank's ``action`` returned."""
        result, problem, cause = None, "", None
        try:
            result = action()
        except SynclineError as error:
            problem = str(error)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, PickleError) as error:
            problem, cause = _root_of(error), error
        answers = self._exchange({"problem": problem, "result": result}, self._call)
        ranks_by_problem: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer["problem"]:
                ranks_by_problem.setdefault(answer["problem"], []).append(rank)
        if ranks_by_problem:
            shown = "; ".join(f"{name_ranks(ranks)}: {problem}" for problem, ranks in ranks_by_problem.items())
            raise CheckpointError(f"Checkpoint {self._target}: a rank {what}: {shown}") from cause
        return [answer["result"] for answer in answers]


def _root_of(error: BaseException) -> str:
    """Say what the operating system refused, if it did: torch's writer then fails once more, and says less."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror + (f" ({found.filename})" if found.filename else "")
        found = found.__cause__ or found.__context__
    return f"{type(error).__name__}: {error}"
