"""What a user may say of a process group: ``pg_options=BackendOptions(...)``, else the variables of ``init()``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from syncline.errors import ConfigurationError
from syncline.observe import Trace
from syncline.pytorch.environment import Arguments, Environment, read_environment
from syncline.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Settings of ``init_process_group("syncline", pg_options=...)``, named and meant as those of :func:`init`.

    What is None is read from its variable (``SYNCLINE_TOPOLOGY``, ``SYNCLINE_SECRET_FILE`` ...), else it is the
    default. The ranks' places and the timeout are what ``torch.distributed`` was told.

    >>> syncline.BackendOptions(silence_s=30.0).silence_s  # seconds
    30.0
    """

    topology: str | Path | Topology | None = None
    """A file, the name of a shipped topology, or a :class:`Topology`; one switch for all ranks if nobody says."""
    host: str | None = None
    """The name of this rank's host in the topology; the launcher's or the machine's if nobody says."""
    job_id: str | None = None
    """Ranks of another job are refused."""
    secret: bytes | str | None = None
    """At least 32 bytes that all ranks share; without one only loopback is used, unless ``insecure``."""
    insecure: bool = False
    """Use other addresses than loopback without a secret. Whoever reaches the port can then join the job."""
    authenticate_frames: bool | None = None
    """Let every frame carry a code keyed by the secret."""
    interface: str | None = None
    """The address, or the interface's name, that the other ranks reach."""
    connect_timeout_s: float | None = None
    """How long a new group waits for its ranks to connect, in seconds."""
    silence_s: float | None = None
    """From when on a rank without a sign of life is lost, in seconds."""
    stall_s: float | None = None
    """From when on a rank that lives, but makes no call, is not waited for any more; default: the group's timeout."""
    trace: str | Path | Trace | None = None
    """Where this rank writes its trace."""
    native: bool | None = None
    """False moves messages in Python, True insists on compiled code."""
    shared_memory: bool | None = None
    """Whether small synchronous calls may go through memory that the ranks of one machine share."""
    bind_thread: bool | None = None
    """Whether the communication thread may be bound to cores."""
    congestion: str | None = None
    """TCP's congestion control, as ``"bbr"``; cubic where the topology has rates, if nobody says."""


def choose_options(given: object) -> BackendOptions:
    """Return what ``pg_options`` means: options, or a topology alone; :class:`ConfigurationError` for all else."""
    if given is None:
        return BackendOptions()
    if isinstance(given, BackendOptions):
        return given
    if isinstance(given, (str, Path, Topology)):
        return BackendOptions(topology=given)
    raise ConfigurationError(
        f"pg_options must be syncline.BackendOptions, a syncline.Topology, or the path or name of one, not {given!r}"
    )


def read_options(options: BackendOptions, *, rank: int, world_size: int, timeout_s: float) -> Environment:
    """Complete the options by variables and defaults, and check them all."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    place = {"rank": rank, "world_size": world_size, "timeout_s": timeout_s}
    return read_environment(given=cast("Arguments", given | place), has_store=True)
