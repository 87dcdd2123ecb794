"""What the fabric knows of priorities: the settings, as a program or a topology file gives them."""

from syncline.topology.priorities import Priorities

__all__ = ["Priorities"]
