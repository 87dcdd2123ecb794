"""YAML read as plain data that still knows the line of every value, so that each error can name one.

Aliases are followed, but a text, a nesting or a number of values beyond any network's, a cycle by reference and a key
given twice are refused here, before anything else looks at the data. What aliases multiply to is counted, not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from syncline.errors import TopologyError

T = TypeVar("T")
_MAX_CHARACTERS = 1 << 22
_MAX_DEPTH = 100
_MAX_VALUES = 250_000
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedData:
    """The data of one YAML document, and the tree of nodes that it was made from."""

    data: object
    node: yaml.Node
    label: str
    _places: dict[int, dict[object, tuple[yaml.Node, yaml.Node]]] = field(default_factory=dict)
    """By node, once asked: each value in it and where a person looks for it, by key or index."""

    def line_of(self, location: Sequence[object]) -> int:
        """Return the line of the value at ``location``, or of the nearest thing above it that exists.

        Steps that are neither a key nor an index of the data (pydantic names the branches of a union) are ignored.
        """
        node, line = self.node, self.node.start_mark.line
        for step in location:
            if id(node) not in self._places:
                self._places[id(node)] = _places(node)
            if step in self._places[id(node)]:
                node, place = self._places[id(node)][step]
                line = place.start_mark.line
        return int(line) + 1

    def errors_at(self, location: Sequence[object]) -> AbstractContextManager[None]:
        """Let errors say that they are about the value at ``location``."""
        return errors_as(partial(self.error, location))

    def error(self, location: Sequence[object], message: str) -> TopologyError:
        """Build the error that says ``message`` about the value at ``location``."""
        return TopologyError(f"{self.label} line {self.line_of(location)}: {message}")


@contextmanager
def errors_as(build: Callable[[str], TopologyError]) -> Iterator[None]:
    """Let ``build`` say where it is that a name or a number is wrong."""
    try:
        yield
    except TopologyError as error:
        raise build(str(error)) from error


def value_at(marked: MarkedData, location: Sequence[str | int], kind: type[T], default: Any = ...) -> T:
    """Return the value at a place of a document, or ``default`` where it is not there; errors name line and key."""
    value: Any = marked.data
    for depth, step in enumerate(location):
        is_there = step in value if isinstance(value, dict) else isinstance(value, list) and step in range(len(value))
        if not is_there:
            if default is not ...:
                return default  # type: ignore[no-any-return]
            raise marked.error(location[:depth], f"key {step!r} is missing; is the file of this format?")
        value = value[step]
    if not isinstance(value, kind):
        what = repr(location[-1]) if location else "the text of the file"
        raise marked.error(location, f"{what} is not a {_NAMES.get(kind, kind.__name__)}; is it of this format?")
    return value


_NAMES: Mapping[type[Any], str] = MappingProxyType({str: "text", dict: "mapping", list: "list", int: "number"})


def read_marked(text: str, *, label: str) -> MarkedData:
    """Read one YAML document; ``label`` (``"Topology 'net.yaml'"``) begins every error."""
    if len(text) > _MAX_CHARACTERS:
        raise TopologyError(
            f"{label}: the file has {len(text)} characters, at most {_MAX_CHARACTERS} are read; write hosts that are "
            "alike as one entry, such as 'h[0-99]'"
        )
    try:
        _check_depth(text, label)
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
    converter = _Converter(loader, label)
    converter.check(node, (), node)
    return MarkedData(data=converter.convert(node), node=node, label=label)


def _check_depth(text: str, label: str) -> None:
    """Refuse deep nesting while the text is a stream of events: libyaml builds nodes by calls of the C stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _too_deep(label, event)


def _too_deep(label: str, place: yaml.Event | yaml.Node) -> TopologyError:
    line = 0 if place.start_mark is None else place.start_mark.line
    return TopologyError(f"{label} line {line + 1}: values are nested more than {_MAX_DEPTH} deep; no network is")


class _Converter:
    """Turns nodes into data, once :meth:`check` has passed."""

    def __init__(self, loader: Any, label: str) -> None:
        self._loader = loader
        self._label = label
        self._sizes: dict[int, tuple[int, int]] = {}

    def check(self, node: yaml.Node, above: tuple[yaml.Node, ...], place: yaml.Node) -> tuple[int, int]:
        """Return how many values and levels a node stands for with all aliases followed; each node is looked at once.

        ``above`` holds the nodes that contain it. ``place`` is where a person looks for it: the key before it, or else
        its container, since an alias's own node stands where the anchor is.
        """
        if any(node is ancestor for ancestor in above):
            raise self._error(place, "this value contains itself (an alias to an ancestor); a topology is a tree")
        known = self._sizes.get(id(node))
        if known is not None:
            num_values, depth = known
        else:
            inner = [self.check(item, (*above, node), where) for item, where in _inside(node)]
            num_values = 1 + sum(values for values, _ in inner)
            depth = 1 + max((levels for _, levels in inner), default=0)
            self._sizes[id(node)] = num_values, depth
        if len(above) + depth > _MAX_DEPTH:
            raise _too_deep(self._label, place)
        if num_values > _MAX_VALUES:
            raise self._error(place, f"more than {_MAX_VALUES} values after aliases are followed; write a smaller file")
        return num_values, depth

    def convert(self, node: yaml.Node) -> object:
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node)
        return self._scalar(node)

    def _convert_mapping(self, node: yaml.MappingNode) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise self._error(key_node, "a key must be a plain word")
            if key in mapping:
                raise self._error(key_node, f"key {key!r} is given twice; keep one")
            mapping[key] = self.convert(value_node)
        return mapping

    def _scalar(self, node: yaml.Node) -> object:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self._error(node, f"{node.value!r} cannot be read; put it in quotes if it is text") from error

    def _error(self, node: yaml.Node, message: str) -> TopologyError:
        return TopologyError(f"{self._label} line {node.start_mark.line + 1}: {message}")


def _inside(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the values in a node, each with where a person looks for it."""
    if isinstance(node, yaml.SequenceNode):
        return [(item, node) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return [(value, key) for key, value in node.value]
    return []


def _places(node: yaml.Node) -> dict[object, tuple[yaml.Node, yaml.Node]]:
    """Return each value in a node, and the node where a person looks for it: a mapping's key, or a sequence's item."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: (value, key) for key, value in reversed(node.value)}
    if isinstance(node, yaml.SequenceNode):
        return {index: (item, item) for index, item in enumerate(node.value)}
    return {}
