"""The page of combinations is the one that the declarations make, and has a row for each setting."""

from combination_table import PAGE, REQUESTS, page, verdict
from syncline.updates import Sharded
from syncline.updates.combinations import SETTINGS, find_combinations


def test_the_page_is_as_the_rules_declare() -> None:
    assert PAGE.read_text() == page(), "run python tests/combination_table.py"


def test_every_setting_is_asked_for_in_some_row() -> None:
    assert all(any(is_there(request) for request in REQUESTS.values()) for is_there in SETTINGS.values())


def test_a_rule_that_declares_nothing_serves_nothing_that_it_would_have_to_know_of() -> None:
    class Silent:
        """A rule of a user's own."""

    refused = {name for name, request in REQUESTS.items() if find_combinations(Silent(), request)}
    assert {"gateway: helper", "elastic=True", 'on_preemption="leave"', "save_on_failure="} <= refused
    assert not refused & {"gateway: one", "memory", 'Priorities(search="auto")'}


def test_the_first_refusal_comes_before_all_that_is_ignored() -> None:
    (one,) = verdict("Sharded(overlap_forward=True)", "elastic=True")
    assert one in Sharded.combinations
    assert one.is_refused
