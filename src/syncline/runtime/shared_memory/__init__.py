"""Small blocking collectives within one machine: training threads meet in shared memory, without the loop."""

from syncline.runtime.shared_memory.collectives import EngineLinks, SharedMemoryCollectives
from syncline.runtime.shared_memory.segment import open_together

__all__ = ["SharedMemoryCollectives", "EngineLinks", "open_together"]
