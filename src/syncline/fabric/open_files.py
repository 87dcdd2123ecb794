"""Whether this process may open the files that a fabric needs: said before the first connection, not by some later one.

Each connection is a file, and so are the loop, the listening socket and what the store takes. Where the limit is too
low, connections fail one by one and other ranks wait for this one until their deadline.
"""

from __future__ import annotations

import resource
from pathlib import Path

from syncline.errors import ConfigurationError

NUM_OWN_FILES = 16
"""What a fabric needs beside its connections: the loop (3), compiled code (2), the listening socket, the store, and
handshakes with those who connect meanwhile."""


def check_open_files(rank: int, *, num_peers: int, num_classes: int) -> None:
    """Raise ``ConfigurationError`` unless ``num_classes`` connections and that of control fit for each peer."""
    allowed, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = _count_open(allowed)
    per_peer = num_classes + 1
    needed = num_open + NUM_OWN_FILES + num_peers * per_peer
    if allowed == resource.RLIM_INFINITY or needed <= allowed:
        return
    roof = (
        "" if hard == resource.RLIM_INFINITY or hard >= needed else f", for which root must raise the hard limit {hard}"
    )
    raise ConfigurationError(
        f"rank {rank} needs {needed} open files, {per_peer} for each of {num_peers} other ranks, {NUM_OWN_FILES} of "
        f"its own and {num_open} that are open, but RLIMIT_NOFILE allows {allowed}; say ulimit -n {needed} or more in "
        f"the shell that starts it{roof}"
    )


def _count_open(allowed: int) -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir())) - 1  # without that of the folder itself
    except OSError:  # not even this one can be opened
        return allowed
