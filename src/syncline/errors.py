"""The exception tree. Every error that a user can meet is a :class:`SynclineError`; this module knows no other.

A message states the rule that was broken, the value that broke it, the remedy, and who (rank, host, file and line).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

Error = TypeVar("Error", bound="SynclineError")


class SynclineError(RuntimeError):
    """Base of every error that Syncline raises on purpose.

    It is a RuntimeError because that is what programs written for ``torch.distributed`` catch.

    >>> text = "{topology: pair, switch: s, children: [{host: a, uplink: 1 Gbps/s}]}"
    >>> try:
    ...     syncline.Topology.parse(text, source="net.yaml")
    ... except syncline.SynclineError as error:
    ...     print(error)
    Topology 'net.yaml' line 1: link rate '1 Gbps/s' is not a rate; write '1 Gbit/s'
    """

    ranks_at_fault: tuple[int, ...] = ()
    """Whom the error names: the ranks that are its cause as far as is known, the likeliest first."""


def accusing(error: Error, *ranks: int) -> Error:
    """Return ``error``, which names these ranks as those at fault, the likeliest first.

    >>> from syncline.errors import DeadlineError, accusing
    >>> accusing(DeadlineError("Rank 1 has not come"), 1).ranks_at_fault
    (1,)
    """
    error.ranks_at_fault = ranks
    return error


class ConfigurationError(SynclineError, ValueError):
    """A value that the user gave (argument, environment variable, file) cannot be used.

    Raised before anything is sent or changed.

    >>> syncline.Priorities(num_classes=0)
    Traceback (most recent call last):
    syncline.errors.ConfigurationError: Priorities: num_classes must be a whole number from 1 to 16, not 0
    """


class UnitError(ConfigurationError):
    """A quantity such as ``"10 Gbit/s"`` cannot be parsed.

    >>> from syncline.units import parse_rate
    >>> parse_rate("1 Gbps/s")
    Traceback (most recent call last):
    syncline.errors.UnitError: '1 Gbps/s' is not a rate; write '1 Gbit/s'
    """


class TopologyError(ConfigurationError):
    """A topology is malformed, or does not fit the job.

    Of a file, the message names the line.

    >>> syncline.Topology.flat(2).host_of(7)
    Traceback (most recent call last):
    syncline.errors.TopologyError: Topology 'flat-2' has no rank 7; its ranks are 0 to 1
    """


class ScheduleError(SynclineError):
    """A draft of a schedule does not do what its collective promises, so it cannot be run.

    Also raised by a planner that does not know the collective.

    >>> from syncline.schedule import PLANNERS, Collective
    >>> PLANNERS["binomial"].plan(syncline.Topology.flat(2), Collective.ALL_REDUCE)
    Traceback (most recent call last):
    syncline.errors.ScheduleError: planner 'binomial' plans broadcast, not all_reduce; take another planner
    """


class FabricError(SynclineError):
    """Messages cannot be moved between ranks."""


class RendezvousError(FabricError):
    """The ranks did not find each other in time."""


class HandshakeError(FabricError):
    """A connection was refused while it was being opened (job, version, rank or secret differ)."""


class PeerLostError(FabricError):
    """A peer is dead, silent for too long, or left.

    ``rank`` is the lost peer, ``host`` its host's name. All calls that need the peer end with it, now and later.

    >>> from syncline.runtime import communicators_in_memory
    >>> first, second = communicators_in_memory(2)
    >>> second.abort("it ended with KeyError: 3")
    >>> first.barrier().wait()
    Traceback (most recent call last):
    syncline.errors.PeerLostError: rank 1 (host memory) is lost: it ended with KeyError: 3, during barrier; rank 0
        waits for it
    >>> first.failure.rank
    1
    >>> first.abort()
    """

    def __init__(self, message: str, *, rank: int, host: str) -> None:
        super().__init__(message)
        self.ranks_at_fault = (rank,)
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        """Let other processes have it, as those that start ranks do: Ray, executors."""
        return partial(type(self), rank=self.rank, host=self.host), self.args, vars(self)


class FabricClosedError(FabricError):
    """The fabric was closed while the operation was under way, or before it began.

    >>> from syncline.runtime import communicators_in_memory
    >>> (alone,) = communicators_in_memory(1)
    >>> alone.close(); alone.barrier()
    Traceback (most recent call last):
    syncline.errors.FabricClosedError: The communication loop 'syncline memory' is stopped, as its fleet or process
        group was closed; call syncline.init() or init_process_group() again, and make anew what used the old one
    """


class DeadlineError(SynclineError, TimeoutError):
    """An operation was not finished at its deadline; the message names whom it waited for.

    >>> from syncline.runtime import communicators_in_memory
    >>> first, second = communicators_in_memory(2)
    >>> try:
    ...     first.barrier(timeout_s=0.1).wait()  # the second makes no call
    ... except syncline.DeadlineError as error:
    ...     print(str(error).partition(" for ")[0])
    rank 1 (host memory) sent nothing of barrier
    >>> first.abort(); second.abort()
    """


class MismatchError(SynclineError):
    """Ranks called different collectives; the message names both calls.

    Every rank gets it, and no call succeeds on this fleet any more.

    >>> from syncline.runtime import communicators_in_memory
    >>> first, second = communicators_in_memory(2)
    >>> calls = first.barrier(), second.broadcast(memoryview(bytearray(8)))
    >>> try:
    ...     calls[0].wait()
    ... except syncline.MismatchError as error:
    ...     print(str(error).partition(", but ")[0])
    rank 0 (host memory) called all_reduce of 1 x uint8 (barrier)
    >>> first.abort(); second.abort()
    """


class UpdateError(SynclineError):
    """An update rule cannot do what the model, the optimizer or the training loop asks of it.

    >>> syncline.distribute(model, torch.optim.LBFGS(model.parameters()), syncline.Sharded())
    Traceback (most recent call last):
    syncline.errors.UpdateError: LBFGS evaluates the model inside step(closure), for which every rank needs all
        gradients; use update=AllReduce(), or another optimizer
    """


class CheckpointError(SynclineError):
    """A checkpoint cannot be written or read.

    What was there before is whole.

    >>> try:
    ...     syncline.load_checkpoint("run1", model)
    ... except syncline.CheckpointError as error:
    ...     print("(no syncline.json in it)" in str(error))
    True
    """


class StorageError(SynclineError):
    """A stage of a phased model cannot be written to its storage, or read from it.

    >>> from syncline.updates.phased.storage import Folder
    >>> Folder("/dev/null/stages")
    Traceback (most recent call last):
    syncline.errors.StorageError: The folder /dev/null/stages cannot be made for stages: [Errno 20] Not a directory:
        '/dev/null/stages'
    """


class LaunchError(SynclineError):
    """A rank's process failed, or could not be started.

    The message has the rank and its traceback.

    >>> try:
    ...     syncline.launch(int, ("three",), ranks=1)
    ... except syncline.LaunchError as error:
    ...     print(str(error).splitlines()[-1])
    ValueError: invalid literal for int() with base 10: 'three'
    """


class LabError(SynclineError):
    """The emulated cluster cannot be built, used or removed on this machine.

    >>> from syncline.lab import Lab
    >>> Lab("two-racks-5-3").link_bytes()
    Traceback (most recent call last):
    syncline.errors.LabError: the lab is not up; call up(), or use it in a with statement
    """


class SynclineWarning(UserWarning):
    """Training goes on, but what it computes is probably not what was meant.

    >>> import warnings
    >>> warnings.simplefilter("error", syncline.SynclineWarning)  # stop at the first
    """


def escape_text(text: str | bytes, *, max_chars: int = 1000) -> str:
    """Return what another process said as errors and logs may show it: in one line, printable, and bounded.

    >>> from syncline.errors import escape_text
    >>> escape_text("a long story", max_chars=9)
    'a long...'
    """
    shown = (text.decode(errors="replace") if isinstance(text, bytes) else text)[: max_chars + 1]
    if not shown.isprintable():  # each call of each rank is described: mostly there is nothing to escape
        shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 3]}..."


_TELLER = re.compile(r" \(as [^()]*(?:\([^()]*\))? reports\)")


def as_told(reason: str, teller: str) -> str:
    """Add who reports a loss that this rank has not found itself: the first who did.

    >>> from syncline.errors import as_told
    >>> as_told("rank 2 sent nothing for 10.0 s", "rank 1 (host h1)")
    'rank 2 sent nothing for 10.0 s (as rank 1 (host h1) reports)'
    """
    return reason if _TELLER.search(reason) else f"{reason} (as {teller} reports)"


def without_teller(text: str) -> str:
    """Leave out what :func:`as_told` has added.

    >>> from syncline.errors import without_teller
    >>> without_teller("rank 2 is gone (as rank 1 (host h1) reports); restart it")
    'rank 2 is gone; restart it'
    """
    return _TELLER.sub("", text)


def name_ranks(ranks: Iterable[int], *, max_named: int = 8) -> str:
    """``"ranks 1, 5 and 6"``; of many, the first few.

    >>> from syncline.errors import name_ranks
    >>> name_ranks({5, 1, 6})
    'ranks 1, 5 and 6'
    """
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > max_named:
        return f"ranks {', '.join(names[:max_named])} and {len(names) - max_named} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
