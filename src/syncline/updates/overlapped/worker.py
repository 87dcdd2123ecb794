"""A worker's side of one bucket, as a state machine: what to push when, and what a pulled global gradient replaces.

The rules are in the package's docstring. In each iteration the driver calls ``step`` with the own gradient, then
``use``; while ``staleness`` is above its bound it waits for an event and calls ``hurry`` and ``use`` again. At any time
it reports ``sent`` (the push has left) and ``arrived`` (a reply is whole). Replies of an older period, and replies that
hold nothing new, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.updates.overlapped.server import Push, Reply

# What the driver is to do. A *place* is a buffer, by number; whoever drives this maps numbers to memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Copy the gradient to ``place``; with ``add``, add it to what lies there."""

    place: int
    add: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Push what lies at ``place``."""

    place: int
    push: Push


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Add what the newest cumulative sum has over the last one used, and subtract what lies at ``subtract``, if any.

    With ``replaces`` set, the gradient of this very step is the one that is in: it is not subtracted, it is not added
    in the first place.
    """

    closed: int
    subtract: int | None
    replaces: bool
    run_length: int
    """Own iterations that a global gradient stands for: the run that is settled by it."""
    num_steps: int = 1
    """Iterations of the fleet that all that is new stands for."""
    num_own: int = 0
    """Own iterations that are in it."""


class PeriodClock:
    """Counts the iterations 1 to ``period`` (K), never lagging behind the fleet.

    A worker that learns that the M contributors of a global gradient have all done iteration j goes on with j + 1 at
    least: it leaves numbers out, uses only G(j) with j no newer than its own iteration, and ends its period together
    with the others, having done as many steps as it could.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.begin_period()

    def begin_period(self) -> None:
        """Start at iteration 0: nothing was done."""
        self.iteration = 0
        self.num_steps = 0
        self.num_samples = 0.0

    def tick(self, *, fleet: int, weight: float) -> int:
        """Begin the next iteration, with ``weight`` samples; ``fleet`` is the iteration that the fleet has done."""
        self.iteration = min(self.period, max(self.iteration, fleet) + 1)
        self.num_steps += 1
        self.num_samples += weight
        return self.iteration

    def catch_up(self, *, reached: int) -> None:
        """After a wait, go on from the iteration that the fleet has ``reached`` meanwhile."""
        self.iteration = min(self.period, max(self.iteration, reached))

    @property
    def is_last(self) -> bool:
        """Whether this iteration ends the period."""
        return self.iteration >= self.period


@dataclass(slots=True, eq=False)
class _Run:
    """Own gradients of consecutive iterations, added together at ``place``."""

    place: int
    first: int
    """Number of the first of these among all own gradients of this period."""
    last: int
    weight: float
    round_number: int = 0
    """0 until it is pushed."""
    pushed_at: int = 0
    """Number of own gradients when it was pushed."""

    @property
    def num_iterations(self) -> int:
        return self.last - self.first + 1


PLACES = {0, 1, 2}
"""For the push that is out, the run in the making, and a settled push that has not left."""


class BucketWorker:
    """Decides for one bucket of one worker (see :mod:`syncline.updates.overlapped`).

    One push is out at most. A second one would stand in the queue of a link that is full, and its gradients grow old
    there; a worker near a server would fill a larger window with one iteration each, rounds that then wait for workers
    far away, whose runs are long (decision 0005).
    """

    def __init__(self, *, rank: int, num_rounds: int) -> None:
        """``num_rounds`` is K, the iterations of a period: a gradient that would be for a later round is not pushed.

        Neither is what would not come back before the period ends, by how long the last push took: it would only be in
        the way of the average, which has it all the same.
        """
        self.rank = rank
        self.num_rounds = num_rounds
        self.period = 0
        self._turnaround = 0
        self._sending: _Run | None = None
        self._begin()

    def _begin(self) -> None:
        self._out: _Run | None = None
        self._making: _Run | None = None
        self.last_round = 0
        """The newest round that this worker pushed for."""
        self._num_own = 0
        self._newest: Reply | None = None
        self.used = 0
        """The newest round whose global gradient was used."""
        self._used_clock = 0
        self.num_unused = 0

    def __repr__(self) -> str:
        return f"<BucketWorker period {self.period}: {self._out or 'nothing'} is out, used {self.used}>"

    @property
    def closed(self) -> int:
        """The newest round that this worker knows to be closed."""
        return self._newest.closed if self._newest is not None else 0

    @property
    def clock(self) -> int:
        """The fleet's iteration, as far as this worker knows."""
        return self._newest.clock if self._newest is not None else 0

    @property
    def reached(self) -> int:
        """The iteration that this worker must be in, at least: a gradient still to be pushed is for a later round."""
        return self.clock + (self._making is not None)

    @property
    def unsettled(self) -> list[tuple[int, int]]:
        """The places of own gradients that are out or in the making, in order, and of how many iterations each is."""
        return [(run.place, run.num_iterations) for run in (self._out, self._making) if run is not None]

    @property
    def staleness(self) -> int:
        """Number of own iterations for which no global gradient was used yet."""
        return sum(count for _, count in self.unsettled)

    def step(self, *, iteration: int, weight: float) -> list[Keep | Send]:
        """Take the own gradient of this iteration; ``weight`` is its number of samples."""
        may_push = iteration + self._turnaround <= self.num_rounds
        return [self._keep(weight), *(self._hand_over(iteration) if may_push else ())]

    @property
    def can_hurry(self) -> bool:
        """Whether something was made that may be pushed at once."""
        return self._making is not None and self._sending is None and self._out is None

    def hurry(self, *, iteration: int) -> list[Send]:
        """Push what was made so far, if nothing is on its way: the worker waits for it."""
        return self._hand_over(iteration)

    def sent(self) -> None:
        """Take note that the push has left."""
        self._sending = None

    def arrived(self, reply: Reply) -> bool:
        """Take note of a reply; whether it is newer than all before, so that its sum is the one to keep."""
        if reply.period != self.period or reply.closed <= self.closed:
            return False
        self._newest = reply
        self.num_unused += 1
        return True

    def use(self) -> Use | None:
        """Use the newest global gradient, if it was not used yet; its pushes are settled."""
        newest = self._newest
        if newest is None or newest.closed == self.used:
            return None
        settled = self._out if self._out is not None and self._out.round_number <= newest.closed else None
        if settled is not None:
            self._out = None
            self._turnaround = self._num_own - settled.pushed_at
        self.used = newest.closed
        self.num_unused = 0
        advance, self._used_clock = newest.clock - self._used_clock, newest.clock
        inside = settled if settled is not None and settled.round_number == newest.accepted else None
        # The gradient of this very step has not been fed to the optimizer yet.
        replaces = inside is not None and inside.first == inside.last == self._num_own
        return Use(
            closed=newest.closed,
            subtract=inside.place if inside is not None and not replaces else None,
            replaces=replaces,
            run_length=settled.num_iterations if settled is not None else 1,
            num_steps=max(1, advance),
            num_own=inside.num_iterations if inside is not None else 0,
        )

    def end_period(self) -> None:
        """Forget what is out: the average of the parameters takes its place."""
        self.period += 1
        self._begin()

    def restart(self) -> int:
        """Forget what is out: the server is dead, and its successor knows nothing of it. Return the pushes forgotten.

        The own gradients stay what they are, steps of this worker; no global gradient replaces them.
        """
        num_forgotten = int(self._out is not None)
        num_own = self._num_own
        self._begin()
        self._num_own = num_own
        return num_forgotten

    def _keep(self, weight: float) -> Keep:
        self._num_own += 1
        run = self._making
        if run is not None:
            run.last = self._num_own
            run.weight += weight
            return Keep(place=run.place, add=True)
        taken = {one.place for one in (self._out, self._sending) if one is not None}
        run = self._making = _Run(min(PLACES - taken), self._num_own, self._num_own, weight)
        return Keep(place=run.place, add=False)

    def _hand_over(self, iteration: int) -> list[Send]:
        run = self._making
        if run is None or not self.can_hurry:
            return []
        self._making = None
        round_number = max(self.last_round, self.closed) + 1
        if round_number > min(self.num_rounds, iteration):
            return []  # others have ended the period, and rounds were abandoned: it stays a step of this worker
        self._sending = run
        self.last_round = run.round_number = round_number
        run.pushed_at = self._num_own
        self._out = run
        weight = run.weight / run.num_iterations
        push = Push(
            worker=self.rank, period=self.period, round_number=run.round_number, iteration=iteration, weight=weight
        )
        return [Send(place=run.place, push=push)]
