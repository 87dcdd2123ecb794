"""The transports that a TCP fabric may have here."""

from syncline.fabric.transport_sets import NativeTransportSet

TRANSPORTS = {"python": "0"} if NativeTransportSet is None else {"python": "0", "native": "1"}
"""Their names, and what SYNCLINE_NATIVE says for each. Without a compiler there is one, and a run says so first."""
ON_ANY_LOOP = {"native on any loop": TRANSPORTS["native"]} if "native" in TRANSPORTS else {}
"""Compiled ones on a loop that does not serve them."""
