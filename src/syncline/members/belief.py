"""Which losses that others tell of are believed.

Ranks do not vote on who is lost: each finds losses by itself, and tells the others. Of two that live and have lost each
other, *the one of the higher number is lost*, for all; so a teller is believed only of ranks above its own. And who has
lost a rank below its own that lives, as far as is known here, is the lost one of the two. Those who have heard that
already give it up, and it takes them for lost in turn; whoever has not heard it yet must not believe that.
:func:`is_believed` is this rule, for everything that is told of losses; :class:`News` keeps what is told one by one, as
on a fabric, until the rank below is found lost here as well.

Who believes passes it on. A rank below the lost one does so in its own name; one above it, which would not be believed,
names the *accuser*, whose word it took. That is believed once the accuser is lost here: it cannot tell of it any more.
As long as it lives, it tells of it itself, or it is a lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet


def is_believed(accuser: int, lost: int, *, found: Iterable[int] = (), known: Collection[int] = ()) -> bool:
    """Whether ``accuser`` is right that ``lost`` is, where ``known`` are known to be; ``found``: all that it accuses.

    >>> is_believed(1, 2), is_believed(2, 1), is_believed(2, 2)  # the last says that it ends itself
    (True, False, True)
    >>> is_believed(1, 2, found=[0, 2]), is_believed(1, 2, found=[0, 2], known={0})  # rank 0 lives, or it is dead
    (False, True)
    """
    return accuser <= lost and all(one in known for one in found if one < accuser)


class News:
    """What others have told one rank of losses.

    >>> news = News()
    >>> news.hear(2, 0, known=set()), news.hear(2, 3, known=set())  # rank 2 has lost 0, which lives; then it tells of 3
    (False, False)
    >>> list(news.find(known={0}))  # rank 0 is dead after all
    [(2, 3)]
    >>> news.hear(5, 4, accuser=1, known={0})  # rank 5 took the word of rank 1, which has not told it here
    False
    >>> list(news.find(known={0, 1}))
    [(1, 4)]
    """

    def __init__(self) -> None:
        self._found_below: dict[int, set[int]] = {}
        """Whom a teller accuses of the ranks below it."""
        self._kept: dict[tuple[int, int], int] = {}
        """On whose word a teller holds a rank for lost."""

    def hear(self, teller: int, lost: int, *, known: AbstractSet[int], accuser: int | None = None) -> bool:
        """Whether to believe ``teller`` now that ``lost`` is lost; ``known`` are those that are known to be.

        ``accuser`` is whose word the teller took, if not its own.
        """
        if accuser is None:
            accuser = teller
        if is_believed(accuser, lost):
            if self._counts(teller, accuser, lost, known):
                return True
            self._kept[teller, lost] = accuser
        elif accuser == teller:
            self._found_below.setdefault(teller, set()).add(lost)
        return False

    def find(self, *, known: AbstractSet[int]) -> Iterator[tuple[int, int]]:
        """Yield who accuses whom in what was kept and can be believed now, the lowest lost rank first.

        ``known`` may grow with each of them: what was told by a rank that is lost itself is not believed any more, as
        nobody who is left shares its view.
        """
        while True:
            self._kept = {told: accuser for told, accuser in self._kept.items() if known.isdisjoint(told)}
            found = [
                (lost, teller)
                for (teller, lost), accuser in self._kept.items()
                if self._counts(teller, accuser, lost, known)
            ]
            if not found:
                return
            lost, teller = min(found)
            yield self._kept.pop((teller, lost)), lost

    def _counts(self, teller: int, accuser: int, lost: int, known: AbstractSet[int]) -> bool:
        """Whether to believe the accuser now, if the word is its own or it cannot tell of it any more."""
        is_its_word = accuser == teller or accuser in known
        return is_its_word and is_believed(accuser, lost, found=self._found_below.get(accuser, ()), known=known)
