"""Bytes between ranks: the fabric protocol, the fabric in memory and the fabric over TCP."""

from syncline.fabric.memory import MemoryFabric, memory_fabrics
from syncline.fabric.protocol import MAX_CONTROL_BYTES, Fabric, FabricListener, PeerLeftError
from syncline.fabric.statistics import ConnectionStatistics, FabricStatistics

__all__ = [
    "Fabric",
    "FabricListener",
    "PeerLeftError",
    "MAX_CONTROL_BYTES",
    "MemoryFabric",
    "memory_fabrics",
    "FabricStatistics",
    "ConnectionStatistics",
]
