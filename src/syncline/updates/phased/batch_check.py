"""Whether both ranks of a pair were given the same batch: the first message of a call has a checksum of it.

A rank uses only its part of a batch (the inputs, or the targets), so nothing else would show that they do not belong
together. What only one of them was given is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from isal import isal_zlib

from syncline.tensors.memory import bytes_of
from syncline.updates.private_torch import tree_leaves

Given: TypeAlias = tuple[tuple[str, str, int], ...]
"""What a rank was given in one call: name, text and checksum of the inputs and of the targets, if there were any."""
MAX_TEXT = 120
_PLAIN = (bool, int, float, complex, str, bytes)


def describe_batch(value: Any) -> tuple[str, int]:
    """Return types and shapes of all that is in ``value``, and a checksum of that and of all its bytes."""
    words = []
    checksum = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            words.append(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}")
            if leaf.layout is torch.strided and leaf.device.type != "meta":
                elements = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
                checksum = isal_zlib.crc32(bytes_of(elements.reshape(-1)), checksum)
        else:
            words.append(ascii(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)
    text = ", ".join(words)
    return text, isal_zlib.crc32(text.encode(), checksum)


def describe_given(inputs: Any, targets: Any) -> Given:
    """Describe the parts of a batch that there are, for the partner.

    >>> describe_given(None, 3)
    (('targets', '3', 1842515611),)
    """
    parts = {"inputs": inputs, "targets": targets}
    described = {name: describe_batch(part) for name, part in parts.items() if part is not None}
    return tuple((name, text[:MAX_TEXT], checksum) for name, (text, checksum) in described.items())


def find_difference(first: tuple[str, Given], second: tuple[str, Given], call: str) -> str | None:
    """Say what two ranks, with their names, were both given in a call, but not the same; None if there is nothing."""
    theirs = {name: checksum for name, _, checksum in second[1]}
    names = [name for name, _, checksum in first[1] if theirs.get(name, checksum) != checksum]
    if not names:
        return None
    told = "; ".join(f"{rank} {_join(given, names)}" for rank, given in (first, second))
    return (
        f"Both ranks of a pair get the same batch, but in {call} their {' and '.join(names)} differ: {told}; let both "
        "read the same data in the same order (a DistributedSampler with num_replicas = number of pairs and rank = "
        "number of the pair)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A rank has found a difference, or has heard of it, and says which."""

    text: str


def _join(given: Given, names: list[str]) -> str:
    return " and ".join(f"{name} {text} (checksum {checksum:08x})" for name, text, checksum in given if name in names)
