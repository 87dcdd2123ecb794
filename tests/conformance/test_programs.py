"""Scripts that are right with DDP give the same here, to rounding, or are refused with a remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import differences
from declarations import ALONE, Program, Refused, all_programs
from rank_worker import result_path

from rank_scripts import script_environment

SUITE_TIMEOUT_S = 900.0
HERE = Path(__file__).parent
Results = Callable[[str, str, int], list[dict[str, Any]]]


def cases() -> list[Any]:
    """Every program under every rule that is compared with its reference."""
    return [
        pytest.param(program, rule, world, id=f"{program.name}-{rule}-{world}")
        for program in all_programs().values()
        for world in program.worlds
        for rule in compared_rules(program)
    ]


def compared_rules(program: Program) -> list[str]:
    """The rules, and the other reference."""
    return [*program.rules, *([ALONE] if program.has_union and program.has_ddp else [])]


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run the programs of all tests that were asked for, once; return what each gave, by rank."""
    wanted: dict[tuple[str, int], dict[str, None]] = defaultdict(dict)
    for item in request.session.items:
        values = getattr(item, "callspec", None)
        if values is None or "program" not in values.params or "rule" not in values.params:
            continue
        program, rule, world = (values.params[name] for name in ("program", "rule", "world"))
        wanted[rule, world][program.name] = None
        wanted[program.reference, world][program.name] = None
    folder = tmp_path_factory.mktemp("conformance")
    plan = [{"rule": rule, "world": world, "programs": list(names)} for (rule, world), names in wanted.items()]
    (folder / "plan.json").write_text(json.dumps(sorted(plan, key=lambda group: -len(group["programs"]))))
    done = subprocess.run(
        [sys.executable, str(HERE / "supervisor.py"), str(folder)],
        env=script_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=SUITE_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr

    def read(name: str, rule: str, world: int) -> list[dict[str, Any]]:
        paths = [result_path(folder, name, rule, rank, world) for rank in range(1 if rule == ALONE else world)]
        missing = {"error": f"hung or died; {folder}/{rule}.*.log say more", "is_refusal": False, "traceback": ""}
        return [torch.load(path) if path.exists() else missing for path in paths]

    return read


@pytest.mark.parametrize(("program", "rule", "world"), cases())
def test_a_script_that_is_right_with_ddp(program: Program, rule: str, world: int, results: Results) -> None:
    found = results(program.name, rule, world)
    refused = program.expected(rule)
    if refused is not None:
        check_refusal(found, refused)
        return
    check_success(found)
    references = results(program.name, program.reference, world)
    check_success(references)
    for rank in range(len(found)):
        expected = references[rank % len(references)]["values"]
        lines = list(differences(found[rank]["values"], expected, program.tolerance))
        assert not lines, f"rank {rank} differs from {program.reference}:\n" + "\n".join(lines[:12])
    if rule != ALONE:
        check_warnings(found, program.warns)


def check_refusal(found: list[dict[str, Any]], refused: Refused) -> None:
    errors = [one.get("error") for one in found]
    assert all(one.get("is_refusal") for one in found), f"not refused on every rank: {errors}{told(found)}"
    assert any(refused.remedy in str(error) for error in errors), f"no remedy {refused.remedy!r} in {errors}"


def check_success(found: list[dict[str, Any]]) -> None:
    assert not any("error" in one for one in found), told(found)


def check_warnings(found: list[dict[str, Any]], words: str | None) -> None:
    given = [one["warnings"] for one in found]
    if words is None:
        assert not any(given), given
    else:
        assert [words in text for text in given[0]] == [True], given


def told(found: list[dict[str, Any]]) -> str:
    return "\n".join(f"rank {rank}: {one.get('traceback') or one.get('error')}" for rank, one in enumerate(found))
