"""Whom ranks believe of losses, in every order; also where one that was given up accuses others."""

import itertools

from syncline.fabric.news import News


def test_a_teller_is_believed_of_ranks_above_its_own():
    news = News()
    assert news.hear(1, 3, known=set())
    assert not news.hear(3, 1, known=set())
    assert not list(news.find(known={1, 3}))


def test_who_has_lost_a_lower_rank_that_lives_is_not_believed():
    news = News()
    assert not news.hear(2, 0, known=set())
    assert not news.hear(2, 3, known=set())
    assert news.hear(1, 3, known=set()), "another may be believed"
    assert not list(news.find(known={1}))
    assert list(news.find(known={0, 1})) == [(2, 3)]
    assert not list(news.find(known={0, 1}))
    assert news.hear(2, 4, known={0, 1, 3})


def test_what_a_rank_told_that_is_lost_itself_is_forgotten():
    """Rank 2 has lost 0 and 3, and is given up; when 0 dies long after, nobody may lose rank 3."""
    news = News()
    assert not news.hear(2, 0, known=set())
    assert not news.hear(2, 3, known=set())
    assert not list(news.find(known={2}))
    assert not list(news.find(known={0, 2}))


def test_one_broken_connection_costs_the_higher_rank_alone_in_every_order():
    """Ranks 0 and 2 lose each other; 1 and 4 believe rank 0 and give up rank 2, which accuses them; 3 hears it last."""
    told = [(0, 2), (2, 0), (2, 4), (2, 3)]
    for order in itertools.permutations(told):
        if order.index((2, 0)) > min(order.index((2, 4)), order.index((2, 3))):
            continue  # what one rank tells comes in its order
        news, known = News(), set()
        for teller, lost in order:
            if teller not in known and news.hear(teller, lost, known=known):
                known.add(lost)
            for _, lost in news.find(known=known):
                known.add(lost)
        assert known == {2}, order
