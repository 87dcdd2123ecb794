"""Records as text: frozen dataclasses of numbers, texts and tuples in JSON, without their payload, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

PAYLOAD = "payload"
"""The field that is not in the text."""


def encode_record(record: Any, **beside: object) -> bytes:
    """Return a record as text; ``beside`` goes with it."""
    names = [field.name for field in dataclasses.fields(record) if field.name != PAYLOAD]
    fields = {name: getattr(record, name) for name in names}
    return json.dumps([type(record).__name__, fields, beside], separators=(",", ":")).encode()


def decode_record(text: bytes, kinds: Mapping[str, Any], what: str) -> tuple[Any, dict[str, Any]]:
    """Return the record and what went beside it; raises ValueError if ``text`` is none of ``kinds``, and says so."""
    try:
        name, fields, beside = json.loads(text)
        record = kinds[name](**{key: _as_tuple(value) for key, value in fields.items()})
        return record, {key: _as_tuple(value) for key, value in beside.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"this is no message of {what}: {text[:80]!r}") from error


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
