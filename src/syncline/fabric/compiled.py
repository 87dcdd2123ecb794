"""The compiled part: without it there is no fabric over TCP, while planning and the fabric in memory need none."""

from __future__ import annotations

import asyncio

from syncline.errors import ConfigurationError


def check_compiled() -> None:
    """Raise :class:`~syncline.errors.ConfigurationError` where the compiled part is missing, with how to get it."""
    try:
        from syncline.fabric import _native  # noqa: F401 - to see whether it is there
    except ImportError as error:
        raise ConfigurationError(
            f"Ranks talk over TCP in compiled code, which this installation lacks ({error}); run "
            "'pip install --force-reinstall --no-deps .' in the clone, or name a wheel in place of the dot; where no "
            "C++ compiler is, pip brings one. It runs on Linux, on x86-64 and aarch64"
        ) from error


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop on which TCP fabrics do best; they run on any.

    >>> loop = new_event_loop()
    >>> loop.run_until_complete(asyncio.sleep(0, "ran")); loop.close()
    'ran'
    """
    try:
        from syncline.fabric.peer_transport import Selector
    except ImportError:  # no fabric over TCP can be opened either
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(Selector())
