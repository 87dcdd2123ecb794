"""What happened: trace events. This room knows no other but the errors."""

from syncline.observe.merge import gather_events, merge_traces
from syncline.observe.trace import NullTrace, Trace

__all__ = ["Trace", "NullTrace", "gather_events", "merge_traces"]
