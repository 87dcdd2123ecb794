"""Makes the name "syncline" known to ``torch.distributed``; what is behind it is loaded with the first group."""

from __future__ import annotations

import sys
from typing import Any

from syncline.backend import NAME
from syncline.late_imports import without_collections


def register() -> None:
    """Register the backend, once, with the torch that is loaded; nothing happens without one.

    torch calls this at the end of its own import, by the entry point ``torch.backends``: so it imports nothing, and
    whatever goes wrong here must not be in the way of somebody who uses torch for something else.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    backend = getattr(module, "Backend", None)
    if backend is None or NAME in getattr(backend, "backend_list", (NAME,)):
        return
    try:
        backend.register_backend(NAME, _create, extended_api=True, devices=_devices())
    except Exception as error:
        import warnings

        warnings.warn(f"torch.distributed does not take the backend 'syncline': {error!r}", stacklevel=2)


def _devices() -> list[str]:
    """Tensors on a GPU are staged through the host's memory."""
    cuda = sys.modules.get("torch.backends.cuda")
    return ["cpu", "cuda"] if cuda is not None and cuda.is_built() else ["cpu"]


def _create(distributed: Any, pg_options: object = None) -> Any:
    """Return this rank's part in a new group; ``torch.distributed`` calls it on the group's members."""
    with without_collections():
        from syncline.backend.creation import create_group

        return create_group(distributed, pg_options)
