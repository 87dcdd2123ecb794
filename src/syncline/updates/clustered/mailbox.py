"""Envelopes on the fabric: the text of one, and its payload of one or several vectors."""

from __future__ import annotations

from dataclasses import replace

from syncline.updates.clustered.messages import Agreed, Contribution, Envelope
from syncline.updates.flat import Vector, VectorShape

NUM_VECTORS = "num_vectors"


def encode_envelope(envelope: Envelope, shape: VectorShape) -> tuple[bytes, list[memoryview]]:
    """Return an envelope as text and payloads; its vectors are of ``shape``."""
    payload: Vector | None = getattr(envelope.message, "payload", None)
    if payload is None:
        return envelope.encode(), []
    num_vectors = payload.shape.num_bytes // shape.num_bytes
    return envelope.encode(**{NUM_VECTORS: num_vectors}), [payload.memory]


def decode_envelope(text: bytes, shape: VectorShape) -> tuple[Envelope, list[memoryview]]:
    """Return the envelope and where its payload is to land; raises ValueError if ``text`` is none."""
    envelope, beside = Envelope.decode(text)
    if NUM_VECTORS not in beside or not isinstance(envelope.message, Contribution | Agreed):
        return envelope, []
    vector = shape.times(beside[NUM_VECTORS]).empty()
    return replace(envelope, message=replace(envelope.message, payload=vector)), [vector.memory]
