"""Whom ranks believe of losses, in every order; also where one that was given up accuses others."""

import itertools

from syncline.members import News, is_believed


def test_of_two_that_lost_each_other_the_lower_is_believed():
    assert is_believed(0, 3)
    assert not is_believed(3, 0)
    assert not is_believed(1, 3, found=[0, 3]), "0 lives, so it is 1 that is lost"
    assert is_believed(1, 3, found=[0, 2, 3], known={0}), "of ranks above it accuses whom it likes"


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


def test_another_s_word_is_taken_once_it_is_lost():
    """Rank 1 accuses 2 and is lost itself; 3 has believed it, and rank 0 holds 2 and 3."""
    news = News()
    assert not news.hear(3, 2, accuser=1, known=set()), "rank 1 would tell of it itself"
    assert list(news.find(known={1})) == [(1, 2)]
    assert news.hear(4, 2, accuser=1, known={1}), "or it is lost already"


def test_another_s_word_is_kept_while_it_has_lost_a_rank_that_lives():
    news = News()
    assert not news.hear(1, 0, known=set())
    assert not news.hear(3, 2, accuser=1, known={1})
    assert list(news.find(known={0, 1})) == [(1, 2)]


def test_no_word_of_a_rank_that_lives_or_does_not_exist_is_taken_and_none_of_one_above():
    news = News()
    for accuser in (0, 2, 4, 5, 99, 2**32 - 2):
        for _ in range(3):
            assert not news.hear(4, 2, accuser=accuser, known=set())
    assert not list(news.find(known={1, 3}))
    assert not news.hear(4, 2, accuser=3, known={3}), "rank 3 is above whom it accuses"
    assert len(news._kept) <= 1, "what a teller repeats takes no more room"


def test_of_two_that_accuse_each_other_on_what_is_kept_only_one_is_lost():
    """Rank 2 has lost 1 and 3; 3 has believed rank 1 that 2 is lost; rank 1 is found lost last."""
    for order in itertools.permutations([(2, 1, 2), (2, 3, 2), (3, 2, 1)]):
        if order.index((2, 1, 2)) > order.index((2, 3, 2)):
            continue  # what one rank tells comes in its order
        news, known = News(), set()
        for teller, lost, accuser in order:
            assert not news.hear(teller, lost, accuser=accuser, known=known)
        known.add(1)
        for _, lost in news.find(known=known):
            known.add(lost)
        assert known == {1, 2}, order


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
            for _, found in news.find(known=known):
                known.add(found)
        assert known == {2}, order


def test_a_rank_is_believed_of_itself_as_it_ends():
    """Where it says why, with a loss below its own that is not known here, once that is known."""
    assert is_believed(3, 3)
    news = News()
    assert not news.hear(3, 2, known=set())
    assert not news.hear(3, 3, known=set())
    assert list(news.find(known={2})) == [(3, 3)]
    assert news.hear(1, 1, known=set())
