"""What happened: trace events. This room knows no other but the errors."""

from syncline.observe.long_work import tell_if_long
from syncline.observe.trace import NullTrace, Trace, align_events, gather_events, merge_traces

__all__ = ["Trace", "NullTrace", "align_events", "gather_events", "merge_traces", "tell_if_long"]
