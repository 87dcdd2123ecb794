"""A period's end with a collective, and what becomes of it where a rank is lost meanwhile and the others go on.

The collective may be over on some ranks when it fails on others. So on each rank it counts once the loop's thread has
taken note of it (:meth:`TreeEnd.run`), before or after it took note of the loss: either the mean is the start of the
next period, which this rank then tells the new servers, or the parameters are sent to them as they were. A server that
hears of both goes on from the later start, and gives it to those who lack it (see :mod:`.server`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from syncline.errors import DeadlineError, PeerLostError
from syncline.runtime.port import Port
from syncline.updates.overlapped.link import WorkerLink
from syncline.updates.overlapped.placement import Succession
from syncline.updates.overlapped.tree_mean import Ends, TreeMean


class TreeEnd:
    """The ends of periods on one rank, as long as they are made together."""

    def __init__(
        self,
        port: Port,
        succession: Succession,
        links: Sequence[WorkerLink],
        *,
        shrinks: bool,
        timeout_s: float,
        stop: Callable[[], None],
        leave_tree: Callable[[], None],
        leave_behind: Callable[[], bool],
    ) -> None:
        """``stop`` ends the period for the servers; ``leave_tree`` goes on through them, on the loop's thread.

        ``leave_behind`` leaves ranks behind that live but do not train; it returns whether somebody was lost.
        """
        self._port = port
        self._succession = succession
        self._links = links
        self._shrinks = shrinks
        self._timeout_s = timeout_s
        self._stop = stop
        self._leave_tree = leave_tree
        self._leave_behind = leave_behind
        self._is_under_way = False
        self._has_someone_left = False

    def run(self, mean: TreeMean, *, num_samples: float, iteration: int, dropped: Sequence[int]) -> Ends | None:
        """Average the parameters; None if a loss leaves it to the servers, and then they are as they were.

        Where no loss is survived, it is raised as the collective's :class:`PeerLostError`.
        """
        if not self._port.call(self._begin, self._timeout_s):
            return None
        self._stop()
        try:
            ends = mean.sum(num_samples=num_samples, iteration=iteration, dropped=dropped)
        except (PeerLostError, DeadlineError) as error:
            if not self._shrinks or (isinstance(error, DeadlineError) and not self._leave_behind()):
                raise
            self._port.call(self._give_up, self._timeout_s)
            return None
        if not self._port.call(partial(self._keep, mean, ends.iteration), self._timeout_s):
            return None
        mean.finish()
        return ends

    def defers(self, *, is_period_begun: bool) -> bool:
        """Whether a rank that left by itself changes nothing yet: all may be about to leave. On the loop's thread."""
        if not self._succession.on_tree or not self._shrinks or (is_period_begun and not self._is_under_way):
            return False
        self._has_someone_left = True  # of a mean under way it may have done its part; if not, the collective says so
        return True

    def go_on(self) -> None:
        """Go on without those who left, if any did; on the training thread, before it needs anybody."""
        if self._has_someone_left:
            self._has_someone_left = False
            self._port.call_soon(self._leave_tree)

    def _begin(self) -> bool:
        if self._has_someone_left:
            self._leave_tree()
        self._is_under_way = self._succession.on_tree
        return self._is_under_way

    def _give_up(self) -> None:
        """Go on through the servers: someone is lost, which this rank sees soon, if it has not yet."""
        self._is_under_way = False
        self._leave_tree()

    def _keep(self, mean: TreeMean, iteration: int) -> bool:
        self._is_under_way = False
        if not self._succession.on_tree:
            return False
        for link, values in zip(self._links, mean.means, strict=True):
            link.keep_mean(values, iteration=iteration)
        return True
