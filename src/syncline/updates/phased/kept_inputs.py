"""What the partner sends for later phases, and what of it is in memory, as a state machine: the next, up to a budget.

What arrives for a micro-batch may be needed long after: the partner computes all micro-batches of a stage before this
rank comes to them, and the input of a stage is needed again on the way back. What is needed when is known, so what is
needed last is spilled to storage, and read again before its phase comes: the optimal replacement of Belady, "A study of
replacement algorithms for a virtual-storage computer" (1966). Nothing changes any more once it has arrived, so each is
written once at most.

Whatever the budget, what the phase that is computed and the one after it need has memory beside it, and so has one
message that is arriving: with that, no budget is too small to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from syncline.tensors.memory import bytes_of
from syncline.updates.messaging import decode_record, encode_record
from syncline.updates.phased.batch_check import Given
from syncline.updates.phased.instructions import Fetch, Forget, Instruction, Kind, Pass, Phase, Remove, Spill
from syncline.updates.phased.micro_batches import WHOLE, Part
from syncline.updates.phased.stage_store import StageStore, stage_file
from syncline.updates.state import dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one phase computed, for the phase that needs it."""

    phase: Phase
    """The phase that needs it."""
    kind: Pass
    number: int
    """Which pass it belongs to."""
    payload: tuple[torch.Tensor | None, ...] = ()
    """Outputs of the stage before, or gradients of the own outputs; None is a gradient that is zero."""
    is_tuple: bool
    """Whether the outputs were a tuple; a single tensor is not."""
    num_samples: float
    """Of the pair's whole batch."""
    share: float = 1.0
    """That of the micro-batch in them."""
    part: Part = WHOLE
    """Which rows of the batch the micro-batch has."""
    loss: float | None = None
    """Of the micro-batches so far, once it is known."""
    given: Given = ()
    """With the first message of a pass: the batch, to be compared."""

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        return sum(tensor.nbytes for tensor in self.payload if tensor is not None)

    def encode(self) -> bytes:
        """Return the text."""
        described = [None if one is None else [str(one.dtype), *one.shape] for one in self.payload]
        return encode_record(self, tensors=described)


def decode(text: bytes) -> tuple[Message, list[memoryview]]:
    """Return the message that a text describes, its tensors not filled yet, and their memory."""
    told, beside = decode_record(text, (Message,), "phased execution")
    kind, stage, micro = told.phase
    message: Message = replace(
        told,
        phase=Phase(Kind(kind), stage, micro),
        kind=Pass(told.kind),
        part=Part(*told.part),
        payload=tuple(None if one is None else _make(one) for one in beside["tensors"]),
    )
    return message, [bytes_of(tensor) for tensor in message.payload if tensor is not None]


def _make(described: Sequence[int | str]) -> torch.Tensor:
    name, *shape = described
    return torch.empty([int(size) for size in shape], dtype=dtype_of(str(name)))


class InputStore:
    """The messages, in memory or in storage as :class:`KeptInputs` decides; with the driver's lock held."""

    def __init__(self, stage_store: StageStore, tell: Callable[[Instruction], None]) -> None:
        """``tell`` is told on the storage thread which instruction is carried out."""
        self._store = stage_store
        self._tell = tell
        self._messages: dict[Phase, Message] = {}
        self._spilled: dict[Phase, bytes] = {}
        """The text of each message that was spilled: it tells what its file holds."""

    def add(self, message: Message) -> None:
        """Take what was sent for ``message.phase``."""
        self._messages[message.phase] = message

    def of(self, phase: Phase) -> tuple[Message, ...]:
        """Return what ``phase`` is computed from, which is in memory."""
        return tuple(self._messages[name] for name in needs(phase))

    def obey(self, instruction: Instruction) -> None:
        """Write a message, read it again, or free its memory or its file."""
        match instruction:
            case Spill(name):
                self._spilled[name] = self._messages[name].encode()
                tensors = _tensors(self._messages[name])
                self._store.write_aside(_file_name(name), tensors, partial(self._tell, instruction), is_input=True)
            case Fetch(name):
                message = self._messages[name] = decode(self._spilled[name])[0]
                self._store.read_aside(_file_name(name), _tensors(message), partial(self._tell, instruction))
            case Forget(name):
                del self._messages[name]
            case Remove(name):
                del self._spilled[name]
                self._store.remove_aside(_file_name(name))


def _file_name(name: Phase) -> str:
    return stage_file(name.stage, f"{name.kind.value}-{name.micro:04d}")


def _tensors(message: Message) -> dict[str, torch.Tensor]:
    return {str(place): tensor for place, tensor in enumerate(message.payload) if tensor is not None}


NUM_NEXT = 2
"""What these many phases need is not counted: the one that is computed, and the next."""


@dataclass(slots=True, kw_only=True)
class _Item:
    """What was sent for one phase."""

    num_bytes: int
    is_here: bool = True
    is_stored: bool = False
    is_busy: bool = False
    """Being written, or read."""
    is_used_up: bool = False

    @property
    def memory_bytes(self) -> int:
        return self.num_bytes if self.is_here or self.is_busy else 0


class KeptInputs:
    """Decides for the inputs of one rank; ``budget_bytes`` None keeps all of them in memory.

    >>> inputs = KeptInputs(budget_bytes=100)
    >>> early, late = Phase(Kind.FORWARD, 1), Phase(Kind.FORWARD, 1, 3)
    >>> inputs.arrived(early, 80), inputs.arrived(late, 80)
    (None, None)
    >>> inputs.go_on([early, Phase(Kind.FORWARD, 1, 1), Phase(Kind.FORWARD, 1, 2), late])
    []
    >>> inputs.arrived(Phase(Kind.FORWARD, 1, 2), 80)
    >>> inputs.go_on([early, Phase(Kind.FORWARD, 1, 1), Phase(Kind.FORWARD, 1, 2), late])
    [Spill(phase=Phase(kind=<Kind.FORWARD: 'forward'>, stage=1, micro=3))]
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        """Most bytes in memory at once."""
        self._items: dict[Phase, _Item] = {}
        self._next: frozenset[Phase] = frozenset()
        """What is not counted."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept any more, in memory or in storage."""
        return not self._items

    @property
    def has_room(self) -> bool:
        """Whether another message may arrive."""
        if self.budget_bytes is None:
            return True
        counted = sum(item.memory_bytes for name, item in self._items.items() if name not in self._next)
        return counted <= self.budget_bytes

    def has_arrived(self, phase: Phase) -> bool:
        """Whether everything was sent that ``phase`` needs."""
        return all(name in self._items for name in needs(phase))

    def is_ready(self, phase: Phase) -> bool:
        """Whether everything that ``phase`` needs is in memory."""
        return all(name in self._items and self._items[name].is_here for name in needs(phase))

    def arrived(self, name: Phase, num_bytes: int) -> None:
        """Take note of what was sent for a phase of the pass that is under way."""
        assert name not in self._items, f"what the {name} needs was sent already"
        self._items[name] = _Item(num_bytes=num_bytes)
        self._count()

    def spilled(self, name: Phase) -> list[Instruction]:
        """Take note that it is in storage now, too."""
        item = self._items[name]
        item.is_busy, item.is_stored = False, True
        return self._release(name) if item.is_used_up else []

    def fetched(self, name: Phase) -> None:
        """Take note that it is in memory again."""
        item = self._items[name]
        item.is_busy, item.is_here = False, True

    def used(self, phase: Phase, *, keeps_input: bool) -> list[Instruction]:
        """Take note that ``phase`` is computed; with ``keeps_input`` its way back needs its input again."""
        released: list[Instruction] = []
        for name in () if keeps_input else needs(phase):
            item = self._items[name]
            item.is_used_up = True
            released += [] if item.is_busy else self._release(name)
        return released

    def go_on(self, upcoming: Iterable[Phase]) -> list[Instruction]:
        """Spill what is needed last, fetch what is needed next; ``upcoming`` are all phases to come, in order."""
        if self.budget_bytes is None or not self._items:
            return []
        upcoming = list(upcoming)
        self._next = frozenset(name for phase in islice(upcoming, NUM_NEXT) for name in needs(phase))
        soon = self._soon(upcoming)
        instructions: list[Instruction] = []
        for name, item in self._items.items():
            if name not in soon and item.is_here and not item.is_busy and not item.is_used_up:
                item.is_here, item.is_busy = not item.is_stored, not item.is_stored
                instructions.append(Forget(name) if item.is_stored else Spill(name))
        for name in soon:
            item = self._items[name]
            if not item.is_here and not item.is_busy and self._may_fetch(name, item):
                item.is_busy = True
                instructions.append(Fetch(name))
        self._count()
        return instructions

    def _soon(self, upcoming: list[Phase]) -> dict[Phase, None]:
        """Return what is to be in memory, in the order in which it is needed."""
        assert self.budget_bytes is not None, "without a budget all stays in memory"
        soon: dict[Phase, None] = {}
        num_bytes = 0
        for name in (name for phase in upcoming for name in needs(phase)):
            item = self._items.get(name)
            if item is None or name in soon:
                continue
            if name not in self._next:
                num_bytes += item.num_bytes
                if num_bytes > self.budget_bytes:
                    break
            soon[name] = None
        return soon

    def _may_fetch(self, name: Phase, item: _Item) -> bool:
        assert self.budget_bytes is not None, "without a budget nothing was spilled"
        counted = sum(one.memory_bytes for other, one in self._items.items() if other not in self._next)
        return name in self._next or counted + item.num_bytes <= self.budget_bytes

    def _release(self, name: Phase) -> list[Instruction]:
        item = self._items.pop(name)
        return [Forget(name), Remove(name)] if item.is_stored else [Forget(name)]

    def _count(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(item.memory_bytes for item in self._items.values()))


def needs(phase: Phase) -> tuple[Phase, ...]:
    """Return the names of what was sent, and ``phase`` is computed from; the first stage's inputs are the user's own.

    >>> [str(name) for name in needs(Phase(Kind.BACKWARD, 2))]
    ['forward of stage 2', 'backward of stage 2']
    """
    own = () if phase.stage == 0 else (Phase(Kind.FORWARD, phase.stage, phase.micro),)
    if phase.kind is Kind.FORWARD:
        return own
    return (phase,) if phase.kind is Kind.LOSS else (*own, phase)
