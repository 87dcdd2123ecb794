"""Small blocking collectives within one machine: training threads meet in shared memory, without the loop."""

from syncline.runtime.board.opening import open_together
from syncline.runtime.board.seat import Seat, SeatLinks

__all__ = ["Seat", "SeatLinks", "open_together"]
