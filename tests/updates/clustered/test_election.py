import random
from collections import Counter

from hypothesis import given, strategies as st

from syncline.updates.clustered import view
from syncline.updates.clustered.view import draw_order, draw_server

RANKS = st.lists(st.integers(0, 1000), min_size=1, max_size=20, unique=True)


@given(st.text("ab/0 é", max_size=8), st.integers(0, 10**9), RANKS, st.integers(0, 1 << 32))
def test_every_rank_draws_the_same_whatever_order_it_knows_the_ranks_in(job, term, ranks, seed) -> None:
    shuffled = tuple(random.Random(seed).sample(ranks, len(ranks)))
    assert draw_order(job, term, tuple(ranks)) == draw_order(job, term, shuffled)
    assert sorted(draw_order(job, term, shuffled)) == sorted(ranks)


@given(st.integers(0, 10**9), RANKS, st.data())
def test_the_dead_are_not_drawn_and_a_death_changes_no_other_draw(term, ranks, data) -> None:
    dead = data.draw(st.sets(st.sampled_from(ranks)))
    server = draw_server("job", term, ranks, dead)
    if len(dead) == len(ranks):
        assert server is None
        return
    assert server in ranks
    assert server not in dead
    for rank in set(ranks) - dead - {server}:
        assert draw_server("job", term, ranks, dead | {rank}) == server


def test_golden_draws_stay_what_they_are() -> None:
    """Ranks with different versions of Python, or of Syncline, must draw alike."""
    assert [draw_server("job", term, range(8), ()) for term in range(12)] == [0, 7, 4, 7, 3, 4, 7, 5, 1, 6, 7, 3]


def test_draws_are_spread_evenly() -> None:
    drawn = Counter(draw_server("job", term, range(4), ()) for term in range(4000))
    assert all(900 < number < 1100 for number in drawn.values()), drawn


def test_an_order_is_drawn_once_whoever_is_dead(monkeypatch):
    """Each message that a rank hears asks who serves, in clusters of hundreds of ranks too."""
    tickets = []
    ticket = view._ticket
    monkeypatch.setattr(view, "_ticket", lambda *which: tickets.append(which) or ticket(*which))
    for num_dead in range(100):
        draw_server("a job of this test alone", 5, range(300), range(num_dead))
    assert len(tickets) == 300
