"""Mutants: the page tells of those that there are, each can be made, and the quick ones are found."""

import ast

import pytest
from mutant_list import MUTANTS
from mutant_types import Change, Mutant, NamedTest, Simulation

import mutants

QUICK = [mutant for mutant in MUTANTS if mutant.is_quick]


def test_the_page_is_what_the_list_says() -> None:
    page = mutants.ROOT / "docs" / "mutants.md"
    assert page.read_text(encoding="utf-8") == mutants.table(), (
        "python tests/mutants/mutants.py --table > docs/mutants.md"
    )


def test_there_are_enough_and_no_two_of_one_name() -> None:
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(QUICK) >= 15


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_can_be_made_and_what_finds_it_is_there(mutant: Mutant) -> None:
    with mutants.copy_of_library(mutant.changes, compiles=False) as folder:
        for change in mutant.changes:
            path = folder / "syncline" / change.file
            assert not path.is_symlink()
            if not change.is_compiled:
                ast.parse(path.read_text(encoding="utf-8"))
            assert (mutants.LIBRARY / change.file).read_text(encoding="utf-8").count(change.before) == 1
    finder = mutant.found_by
    if isinstance(finder, NamedTest):
        assert f"def {finder.name}(" in (mutants.ROOT / finder.file).read_text(encoding="utf-8")
    else:
        assert (mutants.ROOT / f"tests/simulation/scenario_{finder.scenario}.py").is_file()


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_quick_mutants_are_found(mutant: Mutant) -> None:
    assert mutants.judge(mutant) == ""


def test_nothing_is_found_where_nothing_is_changed() -> None:
    assert mutants.judge_unchanged(Simulation(scenario="grants", num_seeds=20)) == ""
    assert (
        mutants.judge_unchanged(NamedTest(file="tests/fabric/test_handshake.py", name="test_garbage_is_told_nothing"))
        == ""
    )


def test_a_mutant_that_does_not_compile_is_told() -> None:
    change = Change(file="fabric/native/process_memory.cpp", before="int read_memory(", after="no_type read_memory(")
    mutant = Mutant(name="x", breaks="y", changes=(change,), found_by=Simulation(scenario="job", num_seeds=1))
    assert "no_type" in mutants.judge(mutant)


def test_a_mutant_that_does_not_fit_the_code_is_told() -> None:
    lost = Change(file="fabric/liveness.py", before="this stands nowhere", after="")
    mutant = Mutant(name="x", breaks="y", changes=(lost,), found_by=Simulation(scenario="grants", num_seeds=1))
    assert "holds this 0 times" in mutants.judge(mutant)


def test_a_mutant_that_lives_is_told() -> None:
    harmless = Change(file="fabric/sizing.py", before="Whether nothing can be learnt", after="Whether it is fixed")
    mutant = Mutant(name="x", breaks="y", changes=(harmless,), found_by=Simulation(scenario="grants", num_seeds=3))
    assert mutants.judge(mutant) == "simulation `grants` does not find it"


def test_what_cannot_be_run_is_no_mutant_that_was_found() -> None:
    mutant = Mutant(name="x", breaks="y", changes=(), found_by=NamedTest(file="tests/none.py", name="test_none"))
    assert "could not be run" in mutants.judge(mutant)
