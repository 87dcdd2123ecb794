"""What is saved beside model and optimizer: states of schedulers, samplers and the like, as text.

They are in torch's own format, which keeps what JSON does not (numbers as keys, tensors), and only plain values are
loaded from it: a checkpoint cannot run code.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from syncline.errors import CheckpointError


class Stateful(Protocol):
    """A scheduler, sampler or the like."""

    def state_dict(self) -> Any:
        """Return all that it needs to go on, in plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from there."""


def encode_parts(parts: Mapping[str, Stateful]) -> dict[str, str]:
    """Return the state of each as text."""
    return {name: _encode(name, part) for name, part in parts.items()}


def load_part(name: str, part: Stateful, text: str) -> None:
    """Let ``part`` go on from the state that is told by a text."""
    try:
        part.load_state_dict(_decode(text))
    except Exception as error:  # a damaged pickle, and a state that does not fit, may raise anything
        raise CheckpointError(
            f"The state of {name}= that was saved cannot be loaded into a {type(part).__name__}: {error}; give the "
            "object that it was saved from, or leave it out"
        ) from error


def _decode(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def _encode(name: str, part: Stateful) -> str:
    data = io.BytesIO()
    try:
        torch.save(part.state_dict(), data)
        text = base64.b64encode(data.getvalue()).decode()
        _decode(text)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"The state_dict() of {name}= has more than plain values and tensors, so it could not be loaded again: "
            f"{error}"
        ) from error
    return text
