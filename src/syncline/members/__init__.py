"""Who the members of a job are: who is lost, whom one believes of that, who goes on, and who comes in.

Decisions without I/O and without PyTorch, below whatever moves bytes, so that everything asks here: the fabric, which
is told of losses; the update rules and elastic jobs, which go on after them; process groups and checkpoints.

An *epoch* is the time in which the members stay the same; each has a communicator of its own. When ranks are lost, the
others agree on who goes on (:class:`Agreement`, which :mod:`syncline.runtime.regroup` drives); when some come, all that
are in the larger job switch to its fabric (:class:`JobRecord`; :mod:`syncline.runtime.joining` connects it).
"""

from syncline.members.agreement import Agreement, Effect, Go, Interrupt, Loss, Report, Stop, Tell
from syncline.members.belief import News, is_believed
from syncline.members.epoch import Elastic, Epoch, MembershipChange
from syncline.members.job_record import NO_FLAGS, Address, Attempt, Flags, JobRecord, Newcomer, address_of
from syncline.members.membership import (
    LOSSES,
    Membership,
    Quorum,
    QuorumLostError,
    describe_ranks,
    successor,
)

__all__ = [
    "Address",
    "Agreement",
    "Attempt",
    "Effect",
    "Elastic",
    "Epoch",
    "Flags",
    "Go",
    "Interrupt",
    "JobRecord",
    "LOSSES",
    "Loss",
    "Membership",
    "MembershipChange",
    "NO_FLAGS",
    "Newcomer",
    "News",
    "Quorum",
    "QuorumLostError",
    "Report",
    "Stop",
    "Tell",
    "address_of",
    "describe_ranks",
    "is_believed",
    "successor",
]
