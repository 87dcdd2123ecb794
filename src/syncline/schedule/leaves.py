"""The ranks of a topology in the order of the tree, so that ranks that are close stand close."""

from __future__ import annotations

from syncline.topology import Node, Topology


def leaves(node: Node) -> tuple[int, ...]:
    """Return the ranks below ``node``, depth first."""
    if not node.children:
        return (node.rank,)  # type: ignore[union-attr]
    return tuple(rank for child in node.children for rank in leaves(child))


def leaves_from(topology: Topology, root: int) -> tuple[int, ...]:
    """Return all ranks depth first, ``root`` first: at each of its ancestors its branch goes before the others."""
    path = topology.path(root)
    order = [root]
    for branch, parent in zip(path, [*path[1:], topology.root], strict=True):
        for child in parent.children:
            if child is not branch:
                order += leaves(child)
    return tuple(order)
