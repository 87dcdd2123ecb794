"""Small blocking collectives within one machine: training threads meet in shared memory, without the loop."""

from syncline.runtime.shared_memory.collectives import EngineLinks, KeptCall, SharedMemoryCollectives
from syncline.runtime.shared_memory.opening import open_together

__all__ = ["SharedMemoryCollectives", "KeptCall", "EngineLinks", "open_together"]
