"""The entries of a topology file as a person writes them, checked one by one by pydantic.

A host:   {host: h0, uplink: 1 Gbit/s, ranks: 2, local: 40 Gbit/s, features: {gpu: a100, memory_gib: 40}}
          (host: "h[0-4]" stands for five such hosts); also `memory: 64 GB` and `gateway: every`, one, auto or helper
A socket: {socket: s0, uplink: 20 GB/s, ranks: 2, local: 40 GB/s}, in `children` of a host or socket, for its `ranks`
A switch: {switch: rack-a, uplink: {up: 1 Gbit/s, down: 2 Gbit/s, latency: 5 us}, children: [...]}
The top:  a host or a switch without uplink; beside it `topology` (its name), `rank_numbers` and `priorities`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    model_validator,
)

from syncline.errors import ConfigurationError, UnitError
from syncline.priorities.settings import Priorities
from syncline.topology.tree import Gateway, Link
from syncline.units import parse_duration, parse_rate, parse_size

MAX_RANKS_OF_HOST = 4096
_Quantity = TypeVar("_Quantity")


def _prefixed(noun: str, parse: Callable[[object], _Quantity]) -> Callable[[object], _Quantity]:
    def validate(value: object) -> _Quantity:
        try:
            return parse(value)
        except UnitError as error:
            raise ValueError(f"{noun} {error}") from error

    return validate


def _positive_rate(value: object) -> float:
    rate = parse_rate(value)
    if rate == 0:
        raise UnitError(f"{value!r} is zero; write a rate above zero")
    return rate


RateText = Annotated[float, BeforeValidator(_prefixed("link rate", _positive_rate))]
SizeText = Annotated[int, BeforeValidator(_prefixed("size", parse_size))]
LatencyText = Annotated[float, BeforeValidator(_prefixed("link latency", parse_duration))]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LinkEntry(_Entry):
    """One rate for both directions, or `up` and `down`; and a latency."""

    rate: RateText | None = None
    up: RateText | None = None
    down: RateText | None = None
    latency: LatencyText = 0.0

    @model_validator(mode="after")
    def _check_rates(self) -> LinkEntry:
        given = (self.rate is not None, self.up is not None, self.down is not None)
        if given not in {(True, False, False), (False, True, True)}:
            raise ValueError("a link needs either 'rate', or both 'up' and 'down'")
        return self

    def link(self) -> Link:
        """Build the link of the tree."""
        up, down = self.up or self.rate, self.down or self.rate
        assert up is not None
        assert down is not None
        return Link(up_bytes_per_s=up, down_bytes_per_s=down, latency_s=self.latency)


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


LinkText = Annotated[LinkEntry, BeforeValidator(_mapping_of_link)]
Feature = Annotated[float | str, PlainValidator(_feature)]


class RanksEntry(_Entry):
    """What has ranks: `local` is the link of each (one for all, or a list with one for each); or sockets with ranks."""

    uplink: LinkText | None = None
    ranks: int = Field(default=1, ge=1, le=MAX_RANKS_OF_HOST)
    local: Annotated[list[LinkText], BeforeValidator(_list_of_links)] | None = None
    children: list[SocketEntry] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check_ranks(self) -> RanksEntry:
        if self.children is not None and {"ranks", "local"} & self.model_fields_set:
            raise ValueError("'ranks' and 'local' belong to the sockets under 'children'; move them there")
        if self.local is not None and len(self.local) not in {1, self.ranks}:
            raise ValueError(f"'local' lists {len(self.local)} links for {self.ranks} ranks; give one, or one for each")
        return self


class SocketEntry(RanksEntry):
    """A level inside a host."""

    socket: str


class HostEntry(RanksEntry):
    """A host."""

    host: str
    features: dict[str, Feature] = Field(default_factory=dict)
    memory: SizeText | None = None
    gateway: Gateway = "every"


def _kind_of(value: Any) -> str | None:
    """Return the tag of an entry; no key can look like a tag, so that locations in errors stay unambiguous."""
    if isinstance(value, dict):
        return next((f"<{kind}>" for kind in ("switch", "host") if kind in value), None)
    return None


class SwitchEntry(_Entry):
    """A switch and what hangs below it."""

    switch: str
    uplink: LinkText | None = None
    children: list[ChildEntry] = Field(min_length=1)


ChildEntry = Annotated[
    Annotated[SwitchEntry, Tag("<switch>")] | Annotated[HostEntry, Tag("<host>")], Discriminator(_kind_of)
]


class PrioritiesEntry(_Entry):
    """The section `priorities`: the settings of :class:`Priorities`, or `off` in place of all of them."""

    num_classes: int | None = None
    dscp: list[int] | None = None
    max_message_bytes: SizeText | None = None
    search: Any = None
    min_gain: float | None = None
    research_at: float | None = None
    measure_steps: int | None = None

    @model_validator(mode="after")
    def _check_settings(self) -> PrioritiesEntry:
        try:
            self.build()
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return self

    def build(self) -> Priorities:
        """Build the settings; what is not given is as in :class:`Priorities`, ``dscp: null`` leaves marks alone."""
        given: dict[str, Any] = {}
        for key in self.model_fields_set:
            value = getattr(self, key)
            given[key] = tuple(value) if isinstance(value, list) else value
        return Priorities(**given)


def _mapping_of_switch(value: object) -> object:
    """Let `priorities: off` and `on` stand for one class, and for the defaults."""
    if isinstance(value, bool):
        return {} if value else {"num_classes": 1, "dscp": None}
    return value


PrioritiesText = Annotated[PrioritiesEntry, BeforeValidator(_mapping_of_switch)]


class _Heading(_Entry):
    topology: str | None = None
    rank_numbers: list[int] | None = None
    priorities: PrioritiesText | None = None


class SwitchDocument(_Heading, SwitchEntry):
    """A whole file whose root is a switch."""


class HostDocument(_Heading, HostEntry):
    """A whole file whose root is a host: a job on one machine."""


_Document = Annotated[
    Annotated[SwitchDocument, Tag("<switch>")] | Annotated[HostDocument, Tag("<host>")], Discriminator(_kind_of)
]
DOCUMENT: TypeAdapter[SwitchDocument | HostDocument] = TypeAdapter(_Document)


def known_keys(
    mapping: object, *, is_root: bool, is_priorities: bool = False, is_socket: bool = False
) -> tuple[str, ...]:
    """Return the keys that an entry like ``mapping`` may have."""
    if is_socket:
        return tuple(SocketEntry.model_fields)
    kind = _kind_of(mapping)
    if kind is None:
        return tuple((PrioritiesEntry if is_priorities else LinkEntry).model_fields)
    entry = SwitchEntry if kind == "<switch>" else HostEntry
    heading = tuple(_Heading.model_fields) if is_root else ()
    return heading + tuple(entry.model_fields)
