"""Where: the tree of switches, hosts and ranks, the rates of its links, and the files that describe it."""

from syncline.topology.topology import Topology
from syncline.topology.tree import DirectedLink, Direction, Host, Link, Node, Rank, Switch

__all__ = ["Topology", "Link", "Rank", "Host", "Switch", "Node", "Direction", "DirectedLink"]
