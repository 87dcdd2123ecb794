"""Which transports a fabric gets: compiled ones where they could be built, unless ``SYNCLINE_NATIVE=0`` says otherwise.

Frames are authenticated in Python alone: the compiled transport has no keyed hash.
"""

from __future__ import annotations

import asyncio
import os

from syncline.errors import ConfigurationError
from syncline.fabric.options import FabricOptions
from syncline.fabric.peer_transport import TransportSet
from syncline.fabric.python_peer_transport import PythonTransportSet
from syncline.fabric.sizing import GrantSizes

_why_not = ""
try:
    from syncline.fabric.native_peer_transport import NativeTransportSet
    from syncline.fabric.native_selector import NativeSelector
except ImportError as error:  # there was no compiler when the package was installed
    NativeTransportSet = NativeSelector = None  # type: ignore[assignment,misc]
    _why_not = str(error)

VARIABLE = "SYNCLINE_NATIVE"


def is_native() -> bool:
    """Whether fabrics get compiled transports now."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ConfigurationError(
            f"{VARIABLE} must be 0, 1 or empty, not {wanted!r}; 0 leaves the compiled transport out"
        )
    if wanted == "1" and NativeTransportSet is None:
        raise ConfigurationError(
            f"{VARIABLE}=1 asks for the compiled transport, which is not installed ({_why_not}); install a C++ "
            "compiler (Debian: g++) and then Syncline again, or leave the variable empty"
        )
    return NativeTransportSet is not None and wanted != "0"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop on which these transports do best; they run on any."""
    return asyncio.SelectorEventLoop(NativeSelector()) if is_native() else asyncio.new_event_loop()


def check_transport(options: FabricOptions) -> None:
    """Refuse options that the transports of ``SYNCLINE_NATIVE`` cannot meet."""
    if options.authenticate_frames and os.environ.get(VARIABLE) == "1":
        raise ConfigurationError(
            f"{VARIABLE}=1 asks for the compiled transport, and authenticate_frames=True for frames that only "
            f"the one in Python can authenticate; leave {VARIABLE} empty, or authenticate_frames "
            "(SYNCLINE_AUTHENTICATE_FRAMES) off on all ranks"
        )


def open_transport_set(sizes: GrantSizes, *, has_keys: bool = False) -> TransportSet:
    """Return a new transport set on the running loop; ``has_keys``: one that authenticates frames."""
    return NativeTransportSet(sizes) if is_native() and not has_keys else PythonTransportSet(sizes)
