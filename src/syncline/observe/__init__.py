"""What happened: trace events. This room knows no other but the errors."""

from syncline.observe.merge import merge_traces
from syncline.observe.trace import NullTrace, Trace

__all__ = ["Trace", "NullTrace", "merge_traces"]
