"""The wires that a TCP fabric may have here."""

from syncline.fabric.wirings import NativeWiring

WIRES = {"python": "0"} if NativeWiring is None else {"python": "0", "native": "1"}
"""Their names, and what SYNCLINE_NATIVE says for each. Without a compiler there is one, and a run says so first."""
