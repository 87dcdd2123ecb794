"""The network found by itself: the hosts of a job measure it together, and get its tree with rates."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.discovery.discovery import MOST_HOSTS, Discovery, discover_network, is_discoverable, measure_again
    from syncline.discovery.following import TrafficWatch
    from syncline.discovery.kept import discovery_folder, recall

__all__ = [
    "MOST_HOSTS",
    "Discovery",
    "is_discoverable",
    "discover_network",
    "discovery_folder",
    "recall",
    "measure_again",
    "TrafficWatch",
]

__getattr__ = late_names(
    __name__,
    {
        "discovery": "MOST_HOSTS Discovery is_discoverable discover_network measure_again",
        "kept": "discovery_folder recall",
        "following": "TrafficWatch",
    },
)
