"""The network found by itself: the hosts of a job measure it together, and get its tree with rates."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.discovery.discovery import (
        MOST_HOSTS as MOST_HOSTS,
        Discovery as Discovery,
        discover_network as discover_network,
        measure_again as measure_again,
    )
    from syncline.discovery.following import TrafficWatch as TrafficWatch
    from syncline.discovery.kept import discovery_folder as discovery_folder, forget as forget, recall as recall

_NAMES = {
    "discovery": "MOST_HOSTS Discovery discover_network measure_again",
    "kept": "discovery_folder forget recall",
    "following": "TrafficWatch",
}

__all__ = [name for text in _NAMES.values() for name in text.split()]
__getattr__ = late_names(__name__, _NAMES)
