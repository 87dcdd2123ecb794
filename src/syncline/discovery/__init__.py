"""The network found by itself: the hosts of a job measure it together, and get its tree with rates."""

from syncline.discovery.discovery import MOST_HOSTS, Discovery, discover_network, is_discoverable
from syncline.discovery.kept import discovery_folder, recall

__all__ = ["MOST_HOSTS", "Discovery", "is_discoverable", "discover_network", "discovery_folder", "recall"]
