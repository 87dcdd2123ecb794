"""Bytes between ranks: the fabric protocol, the fabric in memory and the fabric over TCP."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.fabric.compiled import new_event_loop as new_event_loop
    from syncline.fabric.frames import MEMORY_CLASS as MEMORY_CLASS
    from syncline.fabric.memory import MemoryFabric as MemoryFabric, memory_fabrics as memory_fabrics
    from syncline.fabric.mesh import connect_tcp as connect_tcp
    from syncline.fabric.options import FabricOptions as FabricOptions
    from syncline.fabric.progress import PeerStalls as PeerStalls, Progress as Progress
    from syncline.fabric.protocol import (
        ABORTED as ABORTED,
        BULK as BULK,
        MAX_CONTROL_BYTES as MAX_CONTROL_BYTES,
        MAX_TOLD_BYTES as MAX_TOLD_BYTES,
        Fabric as Fabric,
        FabricListener as FabricListener,
        GivenUpError as GivenUpError,
        PeerLeftError as PeerLeftError,
        Transport as Transport,
    )
    from syncline.fabric.rendezvous import Rendezvous as Rendezvous, Store as Store
    from syncline.fabric.statistics import (
        ClassStatistics as ClassStatistics,
        ConnectionStatistics as ConnectionStatistics,
        FabricStatistics as FabricStatistics,
    )
    from syncline.fabric.tcp import TcpFabric as TcpFabric

_NAMES = {
    "protocol": "Transport Fabric FabricListener GivenUpError PeerLeftError "
    "ABORTED MAX_CONTROL_BYTES MAX_TOLD_BYTES BULK",
    "statistics": "FabricStatistics ConnectionStatistics ClassStatistics",
    "options": "FabricOptions",
    "progress": "PeerStalls Progress",
    "mesh": "connect_tcp",
    "compiled": "new_event_loop",
    "tcp": "TcpFabric",
    "rendezvous": "Rendezvous Store",
    "memory": "MemoryFabric memory_fabrics",
    "frames": "MEMORY_CLASS",
}

__all__ = [name for text in _NAMES.values() for name in text.split()]
__getattr__ = late_names(__name__, _NAMES)
