"""Who the members of a job are: who is lost, whom one believes of that, and whether those who are left may go on.

Decisions without I/O and without PyTorch, below whatever moves bytes, so that everything asks here: the fabric, which
is told of losses; the update rules and elastic jobs, which go on after them; process groups and checkpoints.
"""

from syncline.members.belief import News, is_believed
from syncline.members.membership import Membership, Quorum, QuorumLostError, describe_ranks, successor

__all__ = [
    "Membership",
    "News",
    "Quorum",
    "QuorumLostError",
    "describe_ranks",
    "is_believed",
    "successor",
]
