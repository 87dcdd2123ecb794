"""What happened: trace events and counters. This room knows no other but the errors."""

from syncline.observe.counters import Counters
from syncline.observe.merge import merge_traces
from syncline.observe.trace import NullTrace, Trace

__all__ = ["Trace", "NullTrace", "merge_traces", "Counters"]
