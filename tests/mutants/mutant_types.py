"""What a mutant is: one fault that others' systems had, or ours might have, and what must find it.

A mutant is a change of the library's own text. What finds it is a scenario of `tests/simulation` with the seeds that it
is given, or a test by its name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one file of the library: ``before`` stands in it exactly once."""

    file: str
    before: str
    after: str

    @property
    def is_compiled(self) -> bool:
        """Whether it is C++."""
        return self.file.endswith((".cpp", ".hpp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Seeds of a scenario, one of which must fail; ``scenario`` is the module's name without `scenario_`."""

    scenario: str
    num_seeds: int
    fault: str = ""
    """Of a job: the one fault of all these seeds."""

    def __str__(self) -> str:
        return f"simulation `{self.scenario}`" + (f", fault `{self.fault}`" if self.fault else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTest:
    """A test that must fail."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"`{self.file}::{self.name}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mutant; with ``is_quick``, every run of the tests tries it."""

    name: str
    breaks: str
    changes: tuple[Change, ...]
    found_by: Simulation | NamedTest
    is_quick: bool = True
