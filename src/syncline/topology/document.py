"""A topology file (YAML) made into a topology. Every error names the file and the line, and says what to write.

A host:   {host: h0, uplink: 1 Gbit/s, ranks: 2, local: 40 Gbit/s, features: {gpu: a100, memory_gib: 40}}
          (host: "h[0-4]" stands for five such hosts); also `memory: 64 GB` and `gateway: every`, one, auto or helper
A socket: {socket: s0, uplink: 20 GB/s, ranks: 2, local: 40 GB/s}, in `children` of a host or socket, for its `ranks`
A switch: {switch: rack-a, uplink: {up: 1 Gbit/s, down: 2 Gbit/s, latency: 5 us, loss: 0.2 %}, children: [...]}
          (`loss`, of packets in each direction, is for the lab alone)
The top:  a host or a switch without uplink; beside it `topology` (its name), `rank_numbers` and `priorities`.

Entries are checked one by one by pydantic, and then put together.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from syncline.errors import ConfigurationError, TopologyError, UnitError
from syncline.priorities.settings import Priorities
from syncline.topology.host_matching import expand_hostlist
from syncline.topology.marked import MarkedData, read_marked
from syncline.topology.tree import (
    Gateway,
    Host,
    Link,
    Rank,
    Socket,
    Switch,
    TopologyParts,
    check_name,
    check_num_ranks,
    restricted,
)
from syncline.units import parse_duration, parse_rate, parse_share, parse_size

_SHIPPED = Path(__file__).with_name("shipped")
"""Where the topologies that come with Syncline are, each found by its name without a path."""
MAX_RANKS_OF_HOST = 4096
_Quantity = TypeVar("_Quantity")
_MAX_PROBLEMS_SHOWN = 5
Location = tuple[str | int, ...]


def _prefixed(noun: str, parse: Callable[[object], _Quantity]) -> Callable[[object], _Quantity]:
    def validate(value: object) -> _Quantity:
        try:
            return parse(value)
        except UnitError as error:
            raise ValueError(f"{noun} {error}") from error

    return validate


def _share_below_all(value: object) -> float:
    share = parse_share(value)
    if share >= 1:
        raise UnitError(f"{value!r} is all; write a share below 100 %")
    return share


def _positive_rate(value: object) -> float:
    rate = parse_rate(value)
    if rate == 0:
        raise UnitError(f"{value!r} is zero; write a rate above zero")
    return rate


_RateText = Annotated[float, BeforeValidator(_prefixed("link rate", _positive_rate))]
_SizeText = Annotated[int, BeforeValidator(_prefixed("size", parse_size))]
_LatencyText = Annotated[float, BeforeValidator(_prefixed("link latency", parse_duration))]
_LossText = Annotated[float, BeforeValidator(_prefixed("link loss", _share_below_all))]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _LinkEntry(_Entry):
    """One rate for both directions, or `up` and `down`; a latency, and what an emulated link loses."""

    rate: _RateText | None = None
    up: _RateText | None = None
    down: _RateText | None = None
    latency: _LatencyText = 0.0
    loss: _LossText = 0.0

    @model_validator(mode="after")
    def _check_rates(self) -> _LinkEntry:
        given = (self.rate is not None, self.up is not None, self.down is not None)
        if given not in {(True, False, False), (False, True, True)}:
            raise ValueError("a link needs either 'rate', or both 'up' and 'down'")
        return self

    def link(self) -> Link:
        """Build the link of the tree."""
        up, down = self.up or self.rate, self.down or self.rate
        assert up is not None
        assert down is not None
        return Link(up_bytes_per_s=up, down_bytes_per_s=down, latency_s=self.latency, loss_share=self.loss)


def _mapping_of_link(value: object) -> object:
    return value if isinstance(value, dict) else {"rate": value}


def _list_of_links(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _feature(value: object) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"a feature is a number or text, not {value!r}; quote it")  # noqa: TRY004 - pydantic's way
    try:
        return value if isinstance(value, str) else float(value)
    except OverflowError:
        raise ValueError("a feature is too large a number; quote it") from None


_LinkText = Annotated[_LinkEntry, BeforeValidator(_mapping_of_link)]
Feature = Annotated[float | str, PlainValidator(_feature)]


class _RanksEntry(_Entry):
    """What has ranks: `local` is the link of each (one for all, or a list with one for each); or sockets with ranks."""

    uplink: _LinkText | None = None
    ranks: int = Field(default=1, ge=1, le=MAX_RANKS_OF_HOST)
    local: Annotated[list[_LinkText], BeforeValidator(_list_of_links)] | None = None
    children: list[_SocketEntry] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_ranks(self) -> _RanksEntry:
        if self.children is not None and {"ranks", "local"} & self.model_fields_set:
            raise ValueError("'ranks' and 'local' belong to the sockets under 'children'; move them there")
        if self.local is not None and len(self.local) not in {1, self.ranks}:
            raise ValueError(f"'local' lists {len(self.local)} links for {self.ranks} ranks; give one, or one for each")
        return self


class _SocketEntry(_RanksEntry):
    """A level inside a host."""

    socket: str


class _HostEntry(_RanksEntry):
    """A host."""

    host: str
    features: dict[str, Feature] = Field(default_factory=dict)
    memory: _SizeText | None = None
    gateway: Gateway = "every"


def _kind_of(value: Any) -> str | None:
    """Return the tag of an entry; no key can look like a tag, so that locations in errors stay unambiguous."""
    if isinstance(value, dict):
        return next((f"<{kind}>" for kind in ("switch", "host") if kind in value), None)
    return None


class _SwitchEntry(_Entry):
    """A switch and what hangs below it."""

    switch: str
    uplink: _LinkText | None = None
    children: list[_ChildEntry] = Field(min_length=1)


_ChildEntry = Annotated[
    Annotated[_SwitchEntry, Tag("<switch>")] | Annotated[_HostEntry, Tag("<host>")], Discriminator(_kind_of)
]


class _PrioritiesEntry(_Entry):
    """The section `priorities`: the settings of :class:`Priorities`, or `off` in place of all of them."""

    num_classes: int | None = None
    dscp: list[int] | None = None
    search: Any = None
    measure_steps: int | None = None


def _priorities(entry: _PrioritiesEntry) -> Priorities:
    """Build the settings; what is not given is as in :class:`Priorities`, ``dscp: null`` leaves marks alone."""
    told = ((key, getattr(entry, key)) for key in entry.model_fields_set)
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in told}
    try:
        return Priorities(**given)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


def _mapping_of_switch(value: object) -> object:
    """Let `priorities: off` and `on` stand for one class, and for the defaults."""
    if isinstance(value, bool):
        return {} if value else {"num_classes": 1, "dscp": None}
    return value


_PrioritiesText = Annotated[_PrioritiesEntry, BeforeValidator(_mapping_of_switch), AfterValidator(_priorities)]


class _Heading(_Entry):
    topology: str | None = None
    rank_numbers: list[int] | None = None
    priorities: _PrioritiesText | None = None


class _SwitchDocument(_Heading, _SwitchEntry):
    """A whole file whose root is a switch."""


class _HostDocument(_Heading, _HostEntry):
    """A whole file whose root is a host: a job on one machine."""


_Document = Annotated[
    Annotated[_SwitchDocument, Tag("<switch>")] | Annotated[_HostDocument, Tag("<host>")], Discriminator(_kind_of)
]
DOCUMENT: TypeAdapter[_SwitchDocument | _HostDocument] = TypeAdapter(_Document)


def _known_keys(place: Location) -> tuple[str, ...]:
    """Return the keys that the entry at a place may have; the place tells which branches of unions led there."""
    entries: dict[object, type[BaseModel]] = {"<switch>": _SwitchEntry, "<host>": _HostEntry}
    if place[-1] in entries:
        heading = tuple(_Heading.model_fields) if len(place) == 1 else ()
        return heading + tuple(entries[place[-1]].model_fields)
    is_socket = place[-2:-1] == ("children",)  # an entry below a switch has its tag in between
    other = _PrioritiesEntry if "priorities" in place else _SocketEntry if is_socket else _LinkEntry
    return tuple(other.model_fields)


def parse_document(text: str, *, source: str | None = None) -> TopologyParts:
    """Read the parts of a topology in the text of a file; ``source`` is the file's name, for errors."""
    marked = read_marked(text, label=f"Topology {source or 'text'!r}")
    try:
        document = DOCUMENT.validate_python(marked.data)
    except ValidationError as error:
        raise TopologyError("\n".join(_describe_all(error, marked))) from error
    name = document.topology or (PurePath(source).stem if source else "topology")
    builder = _Builder(marked, document)
    root = builder.build_root(document)
    priorities: Any = document.priorities  # what its entry was made into
    return TopologyParts(name=name, root=root, source=source, priorities=priorities)


class _Builder:
    """Builds nodes in file order, counting ranks and noting the line of each name."""

    def __init__(self, marked: MarkedData, document: _SwitchDocument | _HostDocument) -> None:
        self.lines: dict[str, int] = {}
        self._marked = marked
        self._num_ranks = 0
        self._numbers = document.rank_numbers

    def build_root(self, document: _SwitchDocument | _HostDocument) -> Switch | Host:
        if document.uplink is not None:
            raise self._marked.error(("uplink",), "the root has an uplink, but nothing is above it; remove the key")
        if isinstance(document, _SwitchDocument):
            root: Switch | Host = self._switch(document, None, ())
        else:
            hosts = self._hosts(document, None, ())
            if len(hosts) > 1:
                raise self._marked.error(("host",), "the root is one host; put several under a switch")
            root = hosts[0]
        if self._numbers is None:
            return root
        if sorted(self._numbers) != list(range(self._num_ranks)):
            last = self._num_ranks - 1
            raise self._marked.error(("rank_numbers",), f"'rank_numbers' must list each of 0 to {last} once")
        return restricted(root, dict(enumerate(self._numbers)))  # type: ignore[return-value]

    def _child(self, entry: _SwitchEntry | _HostEntry, location: Location) -> tuple[Switch | Host, ...]:
        link = self._link(entry, location)
        if isinstance(entry, _SwitchEntry):
            return (self._switch(entry, link, location),)
        return self._hosts(entry, link, location)

    def _link(self, entry: _SwitchEntry | _RanksEntry, location: Location) -> Link:
        if entry.uplink is None:
            raise self._marked.error(
                location, "key 'uplink' is missing; write the rate of the link to the parent, such as '1 Gbit/s'"
            )
        return entry.uplink.link()

    def _switch(self, entry: _SwitchEntry, link: Link | None, location: Location) -> Switch:
        self._claim(entry.switch, "switch", (*location, "switch"))
        children: list[Switch | Host] = []
        for index, child in enumerate(entry.children):
            children += self._child(child, (*location, "children", index))
        return Switch(name=entry.switch, link=link, children=tuple(children))

    def _hosts(self, entry: _HostEntry, link: Link | None, location: Location) -> tuple[Host, ...]:
        names = self._names(entry.host, (*location, "host"))
        return tuple(self._host(name, entry, link, location) for name in names)

    def _names(self, hostlist: str, location: Location) -> tuple[str, ...]:
        with self._marked.errors_at(location):
            return expand_hostlist(hostlist)

    def _host(self, name: str, entry: _HostEntry, link: Link | None, location: Location) -> Host:
        self._claim(name, "host", (*location, "host"))
        sockets = self._sockets(name, entry, location)
        ranks = () if sockets else self._ranks(entry, location)
        with self._marked.errors_at((*location, "gateway")):
            return Host(
                name=name,
                link=link,
                ranks=ranks,
                sockets=sockets,
                features=entry.features,
                memory_bytes=entry.memory,
                gateway=entry.gateway,
            )

    def _sockets(self, above: str, entry: _RanksEntry, location: Location) -> tuple[Socket, ...]:
        """Build what is inside a host or a socket of the name ``above``."""
        sockets: list[Socket] = []
        for index, child in enumerate(entry.children or ()):
            place = (*location, "children", index)
            names = self._names(child.socket, (*place, "socket"))
            sockets += (self._socket(above, name, child, place) for name in names)
        return tuple(sockets)

    def _socket(self, above: str, own_name: str, entry: _SocketEntry, location: Location) -> Socket:
        name = f"{above}/{own_name}"
        self._claim(name, "socket", (*location, "socket"), own_name=own_name)
        link = self._link(entry, location)
        return Socket(
            name=name, link=link, children=self._sockets(name, entry, location) or self._ranks(entry, location)
        )

    def _ranks(self, entry: _RanksEntry, location: Location) -> tuple[Rank, ...]:
        with self._marked.errors_at(location):
            check_num_ranks(self._num_ranks + entry.ranks)
        local = [local.link() for local in entry.local or ()] or [Link.unlimited()]
        links = local * entry.ranks if len(local) == 1 else local
        first = self._num_ranks
        self._num_ranks += len(links)
        return tuple(Rank(rank=rank, link=link) for rank, link in enumerate(links, first))

    def _claim(self, name: str, kind: str, location: Location, *, own_name: str | None = None) -> None:
        with self._marked.errors_at(location):
            check_name(name if own_name is None else own_name, kind)
        if name in self.lines:
            message = f"{kind} {name!r} is a name given before, in line {self.lines[name]}; give each its own"
            raise self._marked.error(location, message)
        self.lines[name] = self._marked.line_of(location)


def _describe_all(error: ValidationError, marked: MarkedData) -> list[str]:
    problems = error.errors(include_url=False)
    shown = problems[:_MAX_PROBLEMS_SHOWN]
    lines = [str(marked.error(problem["loc"], _describe(problem))) for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"... and {len(problems) - len(shown)} more")
    return lines


def _describe(problem: Mapping[str, Any]) -> str:
    kind, location, value = problem["type"], problem["loc"], problem["input"]
    key = next((str(step) for step in reversed(location) if isinstance(step, str)), "")
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if kind == "extra_forbidden":
        return _describe_unknown_key(key, location)
    if kind == "too_short" and key == "children":
        is_switch = location[-2:-1] == ("<switch>",)
        return f"this {'switch' if is_switch else 'list of sockets'} is empty; give it children, or leave it out"
    if kind.startswith("union_tag"):
        return "this entry is neither a host nor a switch; begin it with 'host: NAME' or 'switch: NAME'"
    ordinary = {"missing": f"key {key!r} is missing", "string_type": f"{key!r} must be text, not {value!r}; quote it"}
    return ordinary.get(kind, f"{key!r} cannot be {value!r}: {problem['msg'].lower()}")


def _describe_unknown_key(key: str, location: Location) -> str:
    known = _known_keys(location[:-1])
    close = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(known)}"
    return f"unknown key {key!r}; {remedy}"


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped topologies, sorted."""
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))


def find_topology_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a topology and its source; a file of that name goes before a shipped topology."""
    file = Path(path)
    try:
        if not file.is_file() and str(path) in shipped_names():
            name = f"{path}.yaml"
            return (_SHIPPED / name).read_text(encoding="utf-8"), name
        return file.read_text(encoding="utf-8"), str(path)
    except OSError as error:
        names = ", ".join(shipped_names())
        raise TopologyError(
            f"Topology {str(path)!r} cannot be read ({error.strerror}); give a file, or one of the shipped topologies: "
            f"{names}"
        ) from error
    except UnicodeDecodeError as error:
        raise TopologyError(f"Topology {str(path)!r} is not UTF-8 text; save it as UTF-8") from error
