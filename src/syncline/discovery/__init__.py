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
        "MOST_HOSTS": "syncline.discovery.discovery",
        "Discovery": "syncline.discovery.discovery",
        "is_discoverable": "syncline.discovery.discovery",
        "discover_network": "syncline.discovery.discovery",
        "discovery_folder": "syncline.discovery.kept",
        "recall": "syncline.discovery.kept",
        "measure_again": "syncline.discovery.discovery",
        "TrafficWatch": "syncline.discovery.following",
    },
)
