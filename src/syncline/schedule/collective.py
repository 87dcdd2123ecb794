"""What must be true before and after: the four collectives, as data. How it comes about is a schedule's business."""

from __future__ import annotations

from enum import Enum, StrEnum


class Before(Enum):
    """What the ranks hold when a collective begins."""

    CONTRIBUTION = "every rank holds its own contribution to the whole range"
    SHARD = "every rank holds the ranges that it owns"
    ROOT = "the root holds the whole range"


class After(Enum):
    """Which ranks hold the result when a collective is over."""

    OWNERS = "each owner of a range holds its result"
    EVERY_RANK = "every rank holds the whole result"


class Collective(StrEnum):
    """What is to be achieved; ``before`` and ``after`` say it exactly.

    The result of a range is the sum of all contributions, each counted once, if every rank begins with one; otherwise
    it is what the range's holder began with. A range has one owner, or one in each replica; they begin with the same.

    >>> Collective.ALL_REDUCE.after.value
    'every rank holds the whole result'
    """

    before: Before
    after: After

    REDUCE_SCATTER = ("reduce_scatter", Before.CONTRIBUTION, After.OWNERS)
    ALL_GATHER = ("all_gather", Before.SHARD, After.EVERY_RANK)
    ALL_REDUCE = ("all_reduce", Before.CONTRIBUTION, After.EVERY_RANK)
    BROADCAST = ("broadcast", Before.ROOT, After.EVERY_RANK)

    def __new__(cls, value: str, before: Before, after: After) -> Collective:
        """Make a member whose value is its name and which carries its conditions."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.before = before
        member.after = after
        return member

    @property
    def adds(self) -> bool:
        """Whether contributions are added up."""
        return self.before is Before.CONTRIBUTION

    @property
    def needs_owners(self) -> bool:
        """Whether every range must have an owner, because the conditions speak of it."""
        return self.before is Before.SHARD or self.after is After.OWNERS
