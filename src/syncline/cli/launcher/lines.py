"""Cuts a stream of bytes into whole lines, so that the output of several ranks never mixes inside one."""

from __future__ import annotations

LIMIT_BYTES = 1 << 16
REDRAW_INTERVAL_S = 1.0


class LineSplitter:
    """Bytes in, whole lines out (without their ends).

    A line that is longer than ``LIMIT_BYTES`` is cut there, so that memory stays bounded. A progress bar redraws its
    line with carriage returns: of these states only the last one is shown, and while the line is not finished at most
    one in each ``REDRAW_INTERVAL_S``.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._redrawn_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Return the lines that ``data`` completes."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        lines = [_shown(line) for line in whole]
        while len(self._partial) > LIMIT_BYTES:
            lines.append(_shown(self._partial[:LIMIT_BYTES]))
            self._partial = self._partial[LIMIT_BYTES:]
        return lines + self._redrawn(now_s)

    def finish(self) -> list[str]:
        """Return the last line, if its end never came."""
        rest, self._partial = self._partial, b""
        return [_shown(rest)] if rest else []

    def _redrawn(self, now_s: float) -> list[str]:
        drawn, _, rest = self._partial.rpartition(b"\r")
        if not drawn or not rest:  # no redraw yet, or the line's end may still follow ("\r\n")
            return []
        self._partial = b"\r" + rest
        if now_s - self._redrawn_s < REDRAW_INTERVAL_S or not drawn.strip(b"\r"):
            return []
        self._redrawn_s = now_s
        return [_shown(drawn)]


def _shown(line: bytes) -> str:
    """Return what a terminal shows of ``line`` when it is complete."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
