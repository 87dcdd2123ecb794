"""An emulated cluster on one Linux machine: namespaces, bridges and rate-limited links. Needs root and iproute2."""

from syncline.lab.lab import Lab
from syncline.lab.queues import QueueSettings

__all__ = ["Lab", "QueueSettings"]
