"""What users may give, read from annotations: of public calls by :func:`checked`, of settings by :func:`check_fields`.

An annotation says the type. ``Annotated`` says more beside it: :class:`Bounds`, or words for what is meant, where the
type's name tells a user too little. So a rule stands once, at the parameter, and every error has the same form: what is
asked for, and what was given. A number is whatever Python takes for one, but NaN is none, and neither is True. What
only a comparison of several parameters, or the ranks that there are, can tell is checked where that is known.

pydantic would check annotations too, but copies and converts what it checks, and has other words.
"""

from __future__ import annotations

import builtins
import inspect
import math
import sys
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache, wraps
from itertools import chain
from numbers import Integral
from operator import attrgetter
from os import PathLike
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from syncline.errors import ConfigurationError, SynclineError, escape_text

Call = TypeVar("Call", bound=Callable[..., Any])


class Bounds(NamedTuple):
    """Between which values a number is: from ``least`` to ``most``, or above and below others, which are left out."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float | None = None

    def __contains__(self, value: Any) -> bool:
        is_low = self.least <= value and (value > self.above or self.above == -math.inf)
        return bool(is_low and value <= self.most and (self.below is None or value < self.below))

    def __str__(self) -> str:
        lowest = f" above {self.above:g}" if self.above > -math.inf else ""
        if self.least > -math.inf:
            lowest = f" from {self.least:g}"
            lowest += " up" if self.most == math.inf and self.below in (None, math.inf) else ""
        if self.below is not None:
            return f"{lowest}, finite" if self.below == math.inf else f"{lowest} to below {self.below:g}"
        return f"{lowest} to {self.most:.0f}" if self.most < math.inf else lowest


Count = Annotated[int, Bounds(1)]
Whole = Annotated[int, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]
Seconds = Annotated[float, Bounds(above=0, below=math.inf), "a positive number of seconds"]


class _Kind(NamedTuple):
    """What one parameter may be, and how a user is told."""

    accepts: Callable[[Any], bool]
    what: str


_ANYTHING = _Kind(lambda _: True, "anything")


def checked(call: Call) -> Call:
    """Let ``call`` raise :class:`ConfigurationError` for arguments that its annotations do not allow.

    >>> from syncline.arguments import Count, checked
    >>> @checked
    ... def wait(ranks: Count, *, names: "list[str] | None" = None) -> None: ...
    >>> wait(2, names="ab")
    Traceback (most recent call last):
    syncline.errors.ConfigurationError: wait: names must be a list (each: a string), or None, not 'ab'
    """
    function = inspect.unwrap(call)
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]

    @wraps(call)
    def check_and_call(*args: Any, **keywords: Any) -> Any:
        for name, value in chain(zip(positional, args, strict=False), keywords.items()):
            kind = _kind_of(function, name)
            if not kind.accepts(value):
                raise ConfigurationError(_refusal(function.__qualname__.removesuffix(".__init__"), name, kind, value))
        return call(*args, **keywords)

    return cast("Call", check_and_call)


def check_fields(settings: Any, error: type[SynclineError] = ConfigurationError) -> None:
    """Raise ``error`` for a field of a dataclass that its annotation does not allow, first in ``__post_init__``."""
    owner: Any = type(settings)
    for field in filter(attrgetter("init"), fields(settings)):
        value = getattr(settings, field.name)
        if value is not field.default and not (kind := _kind_of(owner, field.name)).accepts(value):
            raise error(_refusal(owner.__name__, field.name, kind, value))


def _refusal(owner: str, name: str, kind: _Kind, value: object) -> str:
    if isinstance(value, type):
        remedy = "" if "class" in kind.what else "; give an object"
        return f"{owner}: {name} must be {kind.what}, not the class {value.__name__}{remedy}"
    return f"{owner}: {name} must be {kind.what}, not {escape_text(repr(value), max_chars=200)}"


class _Names(dict[str, Any]):
    """Names that annotations know: those that are imported for types alone stand for anything."""

    def __missing__(self, name: str) -> Any:
        return Any


@cache
def _kind_of(owner: Any, name: str) -> _Kind:
    """Return what a parameter of a function, or a field of a class, may be: most are never given, and so never read."""
    bases = inspect.getmro(owner) if isinstance(owner, type) else (owner,)
    place = next((base for base in bases if name in inspect.get_annotations(base)), owner)
    known = name if isinstance(owner, type) else _parameter_of(owner, name)
    annotation = {known: inspect.get_annotations(place).get(known, Any)}
    names = _Names(vars(builtins) | vars(sys.modules[place.__module__]))
    hint: Any = get_type_hints(SimpleNamespace(__annotations__=annotation), localns=names, include_extras=True)[known]
    if get_origin(hint) is not Unpack:
        return _kind(hint)
    settings = get_type_hints(get_args(hint)[0], localns=names, include_extras=True)
    if name in settings:
        return _kind(settings[name])
    return _Kind(lambda _: False, f"left out: settings are {', '.join(sorted(settings))}")


def _parameter_of(function: Any, name: str) -> str:
    """Return the parameter that takes what is given by ``name``: that one, or the one for all other names."""
    code = function.__code__
    num_named = code.co_argcount + code.co_kwonlyargcount
    if name in code.co_varnames[:num_named] or not code.co_flags & inspect.CO_VARKEYWORDS:
        return name
    rest: str = code.co_varnames[num_named + bool(code.co_flags & inspect.CO_VARARGS)]
    return rest


def _kind(hint: Any) -> _Kind:
    """Return what an annotation allows."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind = _narrowed(_kind(inner[0]), hint.__metadata__)
    elif origin in {Union, UnionType}:
        kind = _union([_kind(one) for one in inner])
    elif origin is Literal:
        types = set(map(type, inner))
        kind = _Kind(lambda value: type(value) in types and value in inner, _choices(inner))
    elif isinstance(hint, TypeVar):
        kind = _kind(hint.__bound__ or Any)
    elif origin is abc.Callable:
        kind = _Kind(callable, "a function")
    elif origin is type:
        kind = _Kind(
            lambda value: isinstance(value, type) and issubclass(value, inner[0]), f"a {inner[0].__name__} class"
        )
    elif origin is not None and issubclass(origin, abc.Mapping):
        kind = _mapping(_kind(inner[0]), _kind(inner[1]))
    elif origin is not None and origin.__module__ in {"builtins", abc.__name__}:
        kind = _collection(origin, _union([_kind(one) for one in inner if one is not ...]))
    else:
        kind = _PLAIN.get(hint) or _class(origin or hint)
    return kind


def _narrowed(kind: _Kind, metadata: Iterable[object]) -> _Kind:
    """Return the kind within bounds, and in the words that are given."""
    for more in metadata:
        if isinstance(more, Bounds):
            kind = _within(kind, more)
        elif isinstance(more, str):
            kind = _Kind(kind.accepts, more)
    return kind


def _within(kind: _Kind, bounds: Bounds) -> _Kind:
    return _Kind(lambda value: kind.accepts(value) and value in bounds, f"{kind.what}{bounds}")


def _union(kinds: list[_Kind]) -> _Kind:
    if len(kinds) == 1:
        return kinds[0]
    if _ANYTHING in kinds:
        return _ANYTHING
    tests = [kind.accepts for kind in kinds]
    *others, last = [kind.what for kind in kinds]
    return _Kind(lambda value: any(accepts(value) for accepts in tests), f"{', '.join(others)}, or {last}")


def _mapping(keys: _Kind, values: _Kind) -> _Kind:
    def accepts(value: Any) -> bool:
        if not isinstance(value, abc.Mapping):
            return False
        return all(map(keys.accepts, value)) and all(map(values.accepts, value.values()))

    return _Kind(accepts, f"a mapping from {keys.what} to {values.what}")


def _collection(origin: type, each: _Kind) -> _Kind:
    """Return the kind of what has items; iterators are not looked into, and a text is no collection of texts."""
    is_known = issubclass(origin, abc.Collection)

    def accepts(value: Any) -> bool:
        is_it = isinstance(value, origin) and not isinstance(value, str | bytes)
        return is_it and (not is_known or all(map(each.accepts, value)))

    return _Kind(accepts, f"{_article(origin.__name__.lower())} (each: {each.what})")


def _class(own: type) -> _Kind:
    """Return the kind of the objects of a class, or of those that have what a protocol names."""
    if not getattr(own, "_is_protocol", False):
        return _Kind(lambda value: type(value) is own or isinstance(value, own), _article(own.__name__))
    names = {name for base in own.__mro__[:-1] for name in (*vars(base), *inspect.get_annotations(base))}
    public = [name for name in sorted(names) if not name.startswith("_")]
    return _Kind(
        lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in public),
        f"{_article(own.__name__)} (which has {', '.join(public)})",
    )


def _choices(choices: tuple[Any, ...]) -> str:
    *others, last = (f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last


def _article(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOUaeiou" else f"a {name}"


def is_number(value: Any) -> bool:
    """Whether it is a real number, as numpy's and tensors of one element are too, and not NaN."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        return not math.isnan(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


_PLAIN: dict[Any, _Kind] = {
    Any: _ANYTHING,
    object: _ANYTHING,
    int: _Kind(lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    float: _Kind(is_number, "a number"),
    bool: _Kind(
        lambda value: type(value) is bool or (isinstance(value, Integral) and value in (0, 1)), "True or False"
    ),
    bytes: _Kind(lambda value: isinstance(value, bytes), "bytes"),
    str: _Kind(lambda value: isinstance(value, str), "a string"),
    Path: _Kind(lambda value: isinstance(value, PathLike), "a path"),
    NoneType: _Kind(lambda value: value is None, "None"),
}
