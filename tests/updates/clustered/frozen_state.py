"""The state of a clustered job's machines, made comparable: two orders that come to the same state are one."""

from __future__ import annotations

from typing import Any

from syncline.members import Membership
from syncline.updates.clustered.node import Node
from syncline.updates.clustered.server import Member, OuterRound, Server
from syncline.updates.clustered.view import Division, View


def frozen(value: Any) -> object:
    """Turn the state of anything into something that can be compared and hashed.

    This is most of the time of a walk through all orders, so it asks for exact types, and sorts nothing.
    """
    kind = type(value)
    if kind is dict:
        return frozenset([(key, frozen(item)) for key, item in value.items()])
    if kind is set:
        return frozenset(value)
    if kind is list or kind is tuple:
        return tuple([frozen(item) for item in value])
    if kind in _WITH_STATE:
        return tuple([frozen(item) for name, item in vars(value).items() if name not in _NO_STATE])
    return _told(value) if kind in _TOLD else value


def _told(value: Division | Membership) -> object:
    if isinstance(value, Division):
        return value.term, value.clusters
    return frozenset([(rank, loss.has_left) for rank, loss in value.losses.items()])


_TOLD = {Division, Membership}
_WITH_STATE = {Node, Member, Server, OuterRound, View}
_NO_STATE = {
    "_agenda",
    "record_schedule",
    "_record_schedule",
    "_mean",
    "_view",
    "_member",
    "_post",
    "_do",
    "job",
}
