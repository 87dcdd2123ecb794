"""The connection classes of a communicator: which model's buckets are on which, and what is open and sized for them."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.fabric import Fabric
from syncline.priorities.settings import Priorities
from syncline.runtime.loop import CommunicationLoop

ANSWER_S = 30.0
"""The fabric keeps its own deadlines; this is for a loop that does not answer."""


class ConnectionClasses:
    """What all models of a job want of their connections; all ranks call its methods alike, on their training threads.

    Connections are opened once and stay. Messages, windows and grants have the sizes of several classes only while a
    model uses several: small ones let an urgent message overtake, and cost more of them.
    """

    def __init__(self, fabric: Fabric, loop: CommunicationLoop, *, timeout_s: float) -> None:
        self._fabric = fabric
        self._loop = loop
        self._timeout_s = timeout_s
        self._of_models: dict[int, tuple[int, ...]] = {}
        self._is_sized_for_several = False

    @property
    def of_buckets(self) -> tuple[tuple[int, ...], ...]:
        """The class of each bucket, model by model."""
        return tuple(self._of_models.values())

    def check(self, priorities: Priorities) -> None:
        """Raise ``ConfigurationError`` if it can be seen now that these cannot be opened; nothing is opened."""
        self._open(priorities, only_check=True)

    def open(self, priorities: Priorities) -> None:
        """Open these connections to every peer, and wait for them; sizes are those of several classes then.

        Opens nothing that is open. Raises ``ConfigurationError`` where ranks differ, ``HandshakeError`` at the deadline
        and ``PeerLostError``, with who.
        """
        self._open(priorities, only_check=False)
        self._is_sized_for_several |= priorities.is_on

    def assign(self, stream: int, classes: Sequence[int], priorities: Priorities | None = None) -> None:
        """Note the class of each bucket of a model, the first of which has ``stream``.

        With ``priorities`` connections and sizes follow: several classes are opened as by :meth:`open`, and sizes are
        those of one class again once no model has several.
        """
        self._of_models[stream] = tuple(classes)
        if priorities is None:
            return
        if len(set(classes)) > 1:
            self.open(priorities)
        elif self._is_sized_for_several and all(len(set(each)) <= 1 for each in self._of_models.values()):
            self._is_sized_for_several = False
            self._loop.run(self._fabric.use_one_class(), ANSWER_S)

    def _open(self, priorities: Priorities, *, only_check: bool) -> None:
        opening = self._fabric.open_classes(priorities, timeout_s=self._timeout_s, only_check=only_check)
        self._loop.run(opening, self._timeout_s + ANSWER_S)
