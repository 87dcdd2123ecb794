"""Who the members of a job are: who is lost, whom one believes of that, who goes on, and who comes in.

Decisions without I/O and without PyTorch, below whatever moves bytes, so that everything asks here: the fabric, which
is told of losses; the update rules and elastic jobs, which go on after them; process groups and checkpoints.

An *epoch* is the time in which the members stay the same; each has a communicator of its own. When ranks are lost, the
others agree on who goes on (:mod:`~syncline.members.agreement`, which :mod:`syncline.runtime.regroup` drives); when
some come, all switch to a larger job (:mod:`~syncline.members.job_record`), which :mod:`syncline.runtime.joining`
connects.
"""

from syncline.members.epoch import Elastic, Epoch, MembershipChange
from syncline.members.membership import (
    LOSSES,
    Membership,
    News,
    Quorum,
    QuorumLostError,
    describe_ranks,
    is_believed,
    successor,
)

__all__ = [
    "LOSSES",
    "Elastic",
    "Epoch",
    "Membership",
    "MembershipChange",
    "News",
    "Quorum",
    "QuorumLostError",
    "describe_ranks",
    "is_believed",
    "successor",
]
