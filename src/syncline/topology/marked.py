"""YAML read as plain data that still knows the line of every value, so that each error can name one.

Aliases are followed, but a cycle by reference, a key given twice, endless nesting and aliases that multiply without
bound are refused here, before anything else looks at the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from syncline.errors import TopologyError

_MAX_DEPTH = 100
_MAX_VALUES = 1_000_000
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedData:
    """The data of one YAML document, and the tree of nodes that it was made from."""

    data: object
    node: yaml.Node
    label: str

    def line_of(self, location: Sequence[object]) -> int:
        """Return the line of the value at ``location``, or of the nearest thing above it that exists.

        Steps that are neither a key nor an index of the data (pydantic names the branches of a union) are ignored.
        """
        node, line = self.node, self.node.start_mark.line
        for step in location:
            for key, value in _entries(node):
                if key == step:
                    node, line = value, _mark_line(node, step, value)
                    break
        return int(line) + 1

    def error(self, location: Sequence[object], message: str) -> TopologyError:
        """Build the error that says ``message`` about the value at ``location``."""
        return TopologyError(f"{self.label} line {self.line_of(location)}: {message}")


def read_marked(text: str, *, label: str) -> MarkedData:
    """Read one YAML document; ``label`` (``"Topology 'net.yaml'"``) begins every error."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}" if mark else ""
        raise TopologyError(f"{label}{where}: this is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise TopologyError(f"{label}: this is not YAML: {error}") from error
    if node is None:
        raise TopologyError(f"{label} line 1: the file is empty; write 'switch: NAME' and its 'children:'")
    return MarkedData(data=_Converter(loader, label).convert(node, (), node), node=node, label=label)


class _Converter:
    """Turns nodes into data.

    ``above`` holds the nodes that contain the present one. ``place`` is where a person looks for it: the key before
    it, or else its container, since an alias's own node stands where the anchor is.
    """

    def __init__(self, loader: Any, label: str) -> None:
        self._loader = loader
        self._label = label
        self._num_values = 0

    def convert(self, node: yaml.Node, above: tuple[yaml.Node, ...], place: yaml.Node) -> object:
        self._num_values += 1
        if any(node is ancestor for ancestor in above):
            raise self._error(place, "this value contains itself (an alias to an ancestor); a topology is a tree")
        if len(above) > _MAX_DEPTH:
            raise self._error(place, f"values are nested more than {_MAX_DEPTH} deep; no network is")
        if self._num_values > _MAX_VALUES:
            raise self._error(place, f"more than {_MAX_VALUES} values after aliases are followed; write a smaller file")
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item, (*above, node), node) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, above)
        return self._scalar(node)

    def _convert_mapping(self, node: yaml.MappingNode, above: tuple[yaml.Node, ...]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise self._error(key_node, "a key must be a plain word")
            if key in mapping:
                raise self._error(key_node, f"key {key!r} is given twice; keep one")
            mapping[key] = self.convert(value_node, (*above, node), key_node)
        return mapping

    def _scalar(self, node: yaml.Node) -> object:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self._error(node, f"{node.value!r} cannot be read; put it in quotes if it is text") from error

    def _error(self, node: yaml.Node, message: str) -> TopologyError:
        return TopologyError(f"{self._label} line {node.start_mark.line + 1}: {message}")


def _entries(node: yaml.Node) -> list[tuple[object, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return [(key.value, value) for key, value in node.value]
    if isinstance(node, yaml.SequenceNode):
        return list(enumerate(node.value))
    return []


def _mark_line(parent: yaml.Node, step: object, value: yaml.Node) -> int:
    """Return the line of a mapping's key, or of a sequence's item: where a person looks for it."""
    if isinstance(parent, yaml.MappingNode):
        return int(next(key for key, _ in parent.value if key.value == step).start_mark.line)
    return int(value.start_mark.line)
