"""Which transports a fabric gets: compiled ones where they could be built, unless ``SYNCLINE_NATIVE=0`` says otherwise.

Frames are authenticated by compiled code alone, for both transports.
"""

from __future__ import annotations

import asyncio

from syncline.errors import ConfigurationError
from syncline.fabric.options import FabricOptions
from syncline.fabric.peer_transport import TransportSet
from syncline.fabric.python_peer_transport import PythonTransportSet
from syncline.fabric.sizing import GrantSizes
from syncline.variables import process_variables

_why_not = ""
try:
    from syncline.fabric.native_peer_transport import NativeTransportSet
    from syncline.fabric.native_selector import NativeSelector
except ImportError as error:  # there was no compiler when the package was installed
    NativeTransportSet = NativeSelector = None  # type: ignore[assignment,misc]
    _why_not = str(error)

VARIABLE = "SYNCLINE_NATIVE"


def is_native(wanted: bool | None = None) -> bool:
    """Whether fabrics get compiled transports; ``wanted`` goes before the variable."""
    wanted, who = _wanted(wanted)
    if wanted and NativeTransportSet is None:
        raise ConfigurationError(
            f"{who} asks for the compiled transport, which is not installed ({_why_not}); install a C++ compiler "
            "(Debian: g++) and then Syncline again, or leave it out"
        )
    return NativeTransportSet is not None and wanted is not False


def _wanted(given: bool | None) -> tuple[bool | None, str]:
    """Return what the argument says, else the variable, and which of them does."""
    if given is not None:
        return given, f"native={given}"
    text = process_variables().get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE} must be 0, 1 or empty, not {text!r}; 0 leaves the compiled transport out")
    return {"": None, "0": False, "1": True}[text], f"{VARIABLE}={text}"


def new_event_loop(*, native: bool | None = None) -> asyncio.AbstractEventLoop:
    """Return a loop on which these transports do best; they run on any.

    ``native`` as in :class:`FabricOptions`: True raises :class:`~syncline.errors.ConfigurationError` where nothing is
    compiled.

    >>> loop = new_event_loop()
    >>> loop.run_until_complete(asyncio.sleep(0, "ran")); loop.close()
    'ran'
    """
    return asyncio.SelectorEventLoop(NativeSelector()) if is_native(native) else asyncio.new_event_loop()


def check_transport(options: FabricOptions) -> None:
    """Refuse options that the transports which were asked for cannot meet."""
    if options.authenticate_frames and NativeTransportSet is None:
        raise ConfigurationError(
            f"authenticate_frames=True needs compiled code, which is not installed ({_why_not}); install a C++ "
            "compiler (Debian: g++) and then Syncline again, or leave authenticate_frames "
            "(SYNCLINE_AUTHENTICATE_FRAMES) off on all ranks"
        )


def open_transport_set(sizes: GrantSizes, *, native: bool | None = None) -> TransportSet:
    """Return a new transport set on the running loop."""
    return NativeTransportSet(sizes) if is_native(native) else PythonTransportSet(sizes)
