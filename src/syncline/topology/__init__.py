"""Where: the tree of switches, hosts, sockets and ranks, the rates of its links, and the files that describe it."""

from syncline.topology.topology import Topology
from syncline.topology.tree import DirectedLink, Direction, Gateway, Host, Link, Node, Rank, Socket, Switch

__all__ = ["Topology", "Link", "Rank", "Socket", "Host", "Switch", "Node", "Direction", "DirectedLink", "Gateway"]
