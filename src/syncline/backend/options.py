"""What a user may say of a process group: ``pg_options=BackendOptions(...)``, else the variables of ``init()``."""

from __future__ import annotations

from pathlib import Path

from syncline.errors import ConfigurationError
from syncline.pytorch.environment import Arguments, BackendOptions, Environment, read_environment
from syncline.topology import Topology


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
    given = Arguments.of_group(options, rank=rank, world_size=world_size, timeout_s=timeout_s)
    return read_environment(given=given, has_store=True)
