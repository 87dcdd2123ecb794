"""Which wires a fabric gets: compiled ones where they could be built, unless ``SYNCLINE_NATIVE=0`` says otherwise.

Frames are authenticated in Python alone: the compiled wires have no keyed hash.
"""

from __future__ import annotations

import asyncio
import os

from syncline.errors import ConfigurationError
from syncline.fabric.fitting import GrantSizes
from syncline.fabric.options import FabricOptions
from syncline.fabric.python_wire import PythonWiring
from syncline.fabric.wire import Wiring

_why_not = ""
try:
    from syncline.fabric.native_selector import NativeSelector
    from syncline.fabric.native_wire import NativeWiring
except ImportError as error:  # there was no compiler when the package was installed
    NativeWiring = NativeSelector = None  # type: ignore[assignment,misc]
    _why_not = str(error)

VARIABLE = "SYNCLINE_NATIVE"


def is_native() -> bool:
    """Whether fabrics get compiled wires now."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE} must be 0, 1 or empty, not {wanted!r}; 0 leaves the compiled wire out")
    if wanted == "1" and NativeWiring is None:
        raise ConfigurationError(
            f"{VARIABLE}=1 asks for the compiled wire, but that is not installed ({_why_not}); install a C++ compiler "
            "(Debian: g++) and then Syncline again, or leave the variable empty"
        )
    return NativeWiring is not None and wanted != "0"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop on which these wires do best; they run on any."""
    return asyncio.SelectorEventLoop(NativeSelector()) if is_native() else asyncio.new_event_loop()


def check_transport(options: FabricOptions) -> None:
    """Refuse options that the wires of ``SYNCLINE_NATIVE`` cannot meet."""
    if options.authenticate_frames and os.environ.get(VARIABLE) == "1":
        raise ConfigurationError(
            f"{VARIABLE}=1 asks for the compiled wire, and authenticate_frames=True for frames that only the one in "
            f"Python can authenticate; leave {VARIABLE} empty, or authenticate_frames (SYNCLINE_AUTHENTICATE_FRAMES) "
            "off on all ranks"
        )


def open_wiring(sizes: GrantSizes, *, has_keys: bool = False) -> Wiring:
    """Return a new wiring on the running loop; ``has_keys``: one that authenticates frames."""
    return NativeWiring(sizes) if is_native() and not has_keys else PythonWiring(sizes)
