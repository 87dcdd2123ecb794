"""A byte-level GPT in plain PyTorch: 256 symbols in, 256 logits out, nothing that knows of other ranks; and its text.

It learns from the source of Python's own standard library, split into training and validation files.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

NUM_SYMBOLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """How large the model is; the default has 1.4 million parameters."""

    width: int = 192
    num_layers: int = 3
    num_heads: int = 6
    context_length: int = 64
    """Number of bytes that the model sees at once."""


class Rotation(nn.Module):
    """Rotary positions (Su et al. 2021): queries and keys are turned by angles that grow with the position."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        half = shape.width // shape.num_heads // 2
        frequencies = 1000.0 ** -(torch.arange(half) / half)
        angles = torch.arange(shape.context_length)[:, None] * frequencies
        self.cosines = nn.Buffer(angles.cos(), persistent=False)
        self.sines = nn.Buffer(angles.sin(), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        """``x`` is (batch, heads, time, head width), and so is the result."""
        time = x.shape[2]
        left, right = x.chunk(2, dim=-1)
        cosines, sines = self.cosines[:time], self.sines[:time]
        return torch.cat([left * cosines - right * sines, left * sines + right * cosines], dim=-1)


class Attention(nn.Module):
    """Causal self-attention: every position reads itself and what stands before it."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """``x`` is (batch, time, width), and so is the result."""
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = rotation.turn(query), rotation.turn(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """One layer: attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """``x`` is (batch, time, width), and so is the result."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.symbols = nn.Embedding(NUM_SYMBOLS, shape.width)
        self.rotation = Rotation(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.logits = nn.Linear(shape.width, NUM_SYMBOLS, bias=False)
        self.apply(_initialise)

    def forward(self, symbols: Tensor) -> Tensor:
        """``symbols`` is (batch, time) of int64; returns logits (batch, time, 256)."""
        x = self.symbols(symbols)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits: Tensor = self.logits(self.norm(x))
        return logits

    @property
    def num_parameters(self) -> int:
        """Number of trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, Block):  # a layer begins as the identity, so that the first steps may be large
        nn.init.zeros_(module.attention.out.weight)
        nn.init.zeros_(module.mlp_out.weight)


def nats_per_byte(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte; both tensors are (batch, time) of int64."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def sample(model: GPT, prompt: bytes, *, num_bytes: int, temperature: float, seed: int) -> bytes:
    """Continue ``prompt`` by ``num_bytes`` bytes, drawn from what the model expects."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt), dtype=torch.int64)[None]
    for _ in range(num_bytes):
        logits = model(text[:, -model.shape.context_length :])[0, -1] / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn[None]], dim=1)
    return bytes(text[0, len(prompt) :].tolist())


# Folders that are not prose in Python: test data, tables of characters, other people's packages.
LEFT_OUT = frozenset({"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
NUM_VALIDATION_PER_256 = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two runs of bytes (1-D, uint8)."""

    training: Tensor
    validation: Tensor

    def batch(self, *, num_sequences: int, context_length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random windows of the training text: inputs and the bytes that follow, both (sequences, context) of int64.

        The same ``seed`` draws the same windows, on every machine.
        """
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.training) - context_length - 1, (num_sequences,), generator=generator)
        return _windows(self.training, starts, context_length)

    def validation_batch(self, *, num_sequences: int, context_length: int) -> tuple[Tensor, Tensor]:
        """Windows spread evenly over the validation text, always the same ones."""
        last = len(self.validation) - context_length - 1
        return _windows(self.validation, torch.linspace(0, last, num_sequences).long(), context_length)


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the ``*.py`` files below ``folder`` (the standard library).

    Whether a file is for validation depends on its path alone, so that the split is the same in every run and process.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(folder):
        digest = hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()
        parts[digest[0] < NUM_VALIDATION_PER_256].append(path.read_bytes())
    return Corpus(training=_tensor(parts[False]), validation=_tensor(parts[True]))


def source_files(folder: Path) -> list[Path]:
    """List the Python files below ``folder`` in a fixed order."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - LEFT_OUT  # so that large ones are not even entered
        found += [Path(place) / name for name in files if name.endswith(".py")]
    return sorted(found)


def _tensor(files: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(context_length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
