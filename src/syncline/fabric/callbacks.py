"""Calling back into the layer above, whose mistakes must not break a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def call_back(callback: Callable[[], object]) -> None:
    """Call ``callback``; what it raises goes to the loop's exception handler, as from any callback of the loop."""
    try:
        callback()
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a callback of the fabric failed: {error!r}", "exception": error}
        )
