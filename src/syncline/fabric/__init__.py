"""Bytes between ranks: the fabric protocol, the fabric in memory and the fabric over TCP."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.fabric.compiled import new_event_loop
    from syncline.fabric.frames import MEMORY_CLASS
    from syncline.fabric.memory import MemoryFabric, memory_fabrics
    from syncline.fabric.mesh import connect_tcp
    from syncline.fabric.options import FabricOptions
    from syncline.fabric.progress import PeerStalls, Progress, StallHandler
    from syncline.fabric.protocol import (
        ABORTED,
        BULK,
        MAX_CONTROL_BYTES,
        ClassStatistics,
        ConnectionStatistics,
        Fabric,
        FabricListener,
        FabricStatistics,
        GivenUpError,
        PeerLeftError,
        Transport,
    )
    from syncline.fabric.rendezvous import Rendezvous, Store
    from syncline.fabric.tcp import TcpFabric

__all__ = [
    "Transport",
    "Fabric",
    "FabricListener",
    "GivenUpError",
    "PeerLeftError",
    "ABORTED",
    "MAX_CONTROL_BYTES",
    "BULK",
    "FabricOptions",
    "PeerStalls",
    "Progress",
    "StallHandler",
    "connect_tcp",
    "new_event_loop",
    "TcpFabric",
    "Rendezvous",
    "Store",
    "MemoryFabric",
    "memory_fabrics",
    "FabricStatistics",
    "ConnectionStatistics",
    "ClassStatistics",
    "MEMORY_CLASS",
]

__getattr__ = late_names(
    __name__,
    {
        "protocol": "Transport Fabric FabricListener GivenUpError PeerLeftError ABORTED MAX_CONTROL_BYTES BULK "
        "FabricStatistics ConnectionStatistics ClassStatistics",
        "options": "FabricOptions",
        "progress": "PeerStalls Progress StallHandler",
        "mesh": "connect_tcp",
        "compiled": "new_event_loop",
        "tcp": "TcpFabric",
        "rendezvous": "Rendezvous Store",
        "memory": "MemoryFabric memory_fabrics",
        "frames": "MEMORY_CLASS",
    },
)
