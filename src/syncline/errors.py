"""The exception tree. Every error that a user can meet is a :class:`SynclineError`; this module knows no other.

A message states the rule that was broken, the value that broke it, the remedy, and who (rank, host, file and line).
"""

from __future__ import annotations

from collections.abc import Iterable


class SynclineError(Exception):
    """Base of every error that Syncline raises on purpose."""


class ConfigurationError(SynclineError, ValueError):
    """A value that the user gave (argument, environment variable, file) cannot be used."""


class UnitError(ConfigurationError):
    """A quantity such as ``"10 Gbit/s"`` cannot be parsed."""


class TopologyError(ConfigurationError):
    """A topology is malformed, or does not fit the job."""


class ScheduleError(SynclineError):
    """A draft of a schedule does not do what its collective promises, so it cannot be run."""


class FabricError(SynclineError):
    """Messages cannot be moved between ranks."""


class RendezvousError(FabricError):
    """The ranks did not find each other in time."""


class HandshakeError(FabricError):
    """A connection was refused while it was being opened (job, version, rank or secret differ)."""


class PeerLostError(FabricError):
    """A peer is dead, silent for too long, or left.

    ``rank`` is the lost peer, ``host`` its host's name.
    """

    def __init__(self, message: str, *, rank: int, host: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class FabricClosedError(FabricError):
    """The fabric was closed while the operation was under way, or before it began."""


class DeadlineError(SynclineError, TimeoutError):
    """An operation was not finished at its deadline; the message names whom it waited for."""


class MismatchError(SynclineError):
    """Ranks called different collectives; the message names both calls."""


class UpdateError(SynclineError):
    """An update rule cannot do what the model, the optimizer or the training loop asks of it."""


class CheckpointError(SynclineError):
    """A checkpoint cannot be written or read."""


class StorageError(SynclineError):
    """A stage of a phased model cannot be written to its storage, or read from it."""


class LaunchError(SynclineError):
    """A rank's process failed, or could not be started."""


class LabError(SynclineError):
    """The emulated cluster cannot be built, used or removed on this machine."""


class SynclineWarning(UserWarning):
    """Training goes on, but what it computes is probably not what was meant."""


def escape_text(text: str | bytes, *, max_chars: int = 1000) -> str:
    """Return what another process said as errors and logs may show it: in one line, printable, and bounded."""
    known = text.decode(errors="replace") if isinstance(text, bytes) else text
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in known[: max_chars + 1]
    )
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 3]}..."


def name_ranks(ranks: Iterable[int], *, max_named: int = 8) -> str:
    """``"ranks 1, 5 and 6"``; of many, the first few."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > max_named:
        return f"ranks {', '.join(names[:max_named])} and {len(names) - max_named} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
