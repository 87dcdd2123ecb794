"""What the reference shows has an example: each name in its docstring, each public member there or in its class's."""

import inspect
import re

import pytest

import syncline
from misuse_calls import World
from reference_names import PAGES, REFERENCE, names_of

WITHOUT_EXAMPLE = {
    "syncline.errors.FabricError": "a base class; those below it have examples",
    "syncline.errors.RendezvousError": "needs a rank that does not come, and the seconds until it is given up",
    "syncline.errors.HandshakeError": "needs two processes that differ in what they were started with",
}
"""Names that the reference shows, and why no example of a few lines can show them."""


def has_example(value: object) -> bool:
    return ">>> " in (value.__doc__ or "")


def names_without_example(names: dict[str, object]) -> list[str]:
    return [name for name, value in names.items() if not has_example(value)]


@pytest.mark.parametrize("name", REFERENCE)
def test_each_name_of_the_reference_has_an_example(name: str) -> None:
    assert has_example(REFERENCE[name]) != (name in WITHOUT_EXAMPLE), "an example, or a reason, and not both"


@pytest.mark.parametrize("name", [name for name, value in REFERENCE.items() if inspect.isclass(value)])
def test_each_public_member_of_the_reference_says_something(name: str) -> None:
    members = {key: value for key, value in vars(REFERENCE[name]).items() if not key.startswith("_")}
    asked = {key: value for key, value in members.items() if callable(value) or isinstance(value, property)}
    asked |= {key: value for key, value in members.items() if isinstance(value, classmethod | staticmethod)}
    assert not [key for key, value in asked.items() if not inspect.isclass(value) and not value.__doc__]


def test_a_fleet_and_its_page_show_what_is_for_users() -> None:
    page = next(page.read_text() for page in PAGES if page.stem == "training")
    hidden = [re.compile(text) for text in re.findall(r'^ +- "!(.+)"$', page, re.MULTILINE)]
    with World() as world:
        shown = {name for name in dir(world.fleet) if not name.startswith("_")}
        names = vars(syncline.Fleet).keys() | vars(world.fleet).keys()
    assert {name for name in names if not any(pattern.search(name) for pattern in hidden)} == shown
    assert {"rank", "all_reduce", "on_close", "close", "metrics", "trace"} <= shown
    assert not {"growth", "recovery", "communicator", "error_in_flight", "notice"} & shown


def test_names_of_every_kind_are_found() -> None:
    assert {"syncline.Fleet", "syncline.data.sampler", "syncline.schedule.verify"} <= REFERENCE.keys()
    assert {"syncline.errors.TopologyError", "syncline.errors.escape_text"} <= REFERENCE.keys()
    assert len(REFERENCE) == len(set(map(id, REFERENCE.values()))), "a name is shown twice"
    assert sum(page.read_text().count("\n::: ") for page in PAGES) <= len(REFERENCE)
    assert WITHOUT_EXAMPLE.keys() <= REFERENCE.keys()


def test_a_page_with_a_name_that_has_no_example_is_refused() -> None:
    page = "# Rates\n\n::: syncline.topology.Link\n::: syncline.units.format_size\n    options: {members: false}\n"
    assert names_without_example(names_of(page)) == ["syncline.units.format_size"]
