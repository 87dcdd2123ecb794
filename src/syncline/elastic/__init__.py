"""Jobs that outlive their machines: who goes on after a loss, and how their training does.

An *epoch* is the time in which the members stay the same; each has a communicator of its own. When ranks are lost, the
others agree on who goes on (:mod:`~syncline.elastic.agreement`, without I/O; :mod:`~syncline.elastic.regroup` drives
it), and what the training had under way is made again, or taken over from who has it
(:mod:`~syncline.elastic.calls`).
"""

from syncline.elastic.agreement import Agreement, Go, Interrupt, Loss, Report, Stop, Tell
from syncline.elastic.epoch import Epoch, MembershipChange
from syncline.elastic.settings import Elastic

__all__ = [
    "Agreement",
    "Elastic",
    "Epoch",
    "Go",
    "Interrupt",
    "Loss",
    "MembershipChange",
    "Report",
    "Stop",
    "Tell",
]
