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
    """Add what the newest cumulative sum has over the last one used, and subtract what lies at ``subtract``.

    With ``replaces`` set, the gradient of this very step is among those that are in: it is not subtracted, it is not
    added in the first place.
    """

    closed: int
    subtract: tuple[int, ...]
    replaces: bool
    run_length: int
    """Own iterations that a global gradient stands for: the longest run that is settled by it."""
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


class BucketWorker:
    """Decides for one bucket of one worker (see :mod:`syncline.updates.overlapped`)."""

    def __init__(self, *, rank: int, window: int, num_rounds: int, period: int = 0, holds_back: bool = True) -> None:
        """``window``: at most so many pushes are out. Places are numbered from 0 to ``num_places - 1``.

        ``num_rounds`` is K, the iterations of a period: a gradient that would be for a later round is not pushed. With
        ``holds_back`` neither is what would not come back before the period ends, by how long the last push took: it
        would only be in the way of the average, which has it all the same.
        """
        self.rank = rank
        self._holds_back = holds_back
        self.window = window
        self.num_rounds = num_rounds
        self.period = period
        self._turnaround = 0
        self._sending: _Run | None = None
        self._begin()

    @property
    def num_places(self) -> int:
        """One for each push that is out, one for the run in the making, one for a settled push that has not left."""
        return self.window + 2

    def _begin(self) -> None:
        self._free = list(range(self.num_places - 1, -1, -1))
        if self._sending is not None:
            self._free.remove(self._sending.place)
        self._out: list[_Run] = []
        self._making: _Run | None = None
        self._last_round = 0
        self._num_own = 0
        self._newest: Reply | None = None
        self._used = 0
        self._used_clock = 0
        self.num_unused = 0

    def __repr__(self) -> str:
        return f"<BucketWorker period {self.period}: {len(self._out)} pushes out, used {self._used}>"

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
    def used(self) -> int:
        """The newest round whose global gradient was used."""
        return self._used

    @property
    def last_round(self) -> int:
        """The newest round that this worker pushed for."""
        return self._last_round

    @property
    def unsettled(self) -> list[tuple[int, int]]:
        """The places of own gradients that are out or in the making, in order, and of how many iterations each is."""
        runs = [*self._out, self._making] if self._making is not None else self._out
        return [(run.place, run.num_iterations) for run in runs]

    @property
    def staleness(self) -> int:
        """Number of own iterations for which no global gradient was used yet."""
        making = self._making.num_iterations if self._making is not None else 0
        return making + sum(run.num_iterations for run in self._out)

    def step(self, *, iteration: int, weight: float) -> list[Keep | Send]:
        """Take the own gradient of this iteration; ``weight`` is its number of samples."""
        may_push = not self._holds_back or iteration + self._turnaround <= self.num_rounds
        return [self._keep(weight), *(self._hand_over(iteration) if may_push else ())]

    @property
    def can_hurry(self) -> bool:
        """Whether something was made that may be pushed at once."""
        return self._making is not None and self._sending is None and len(self._out) < self.window

    def hurry(self, *, iteration: int) -> list[Send]:
        """Push what was made so far, if nothing is on its way: the worker waits for it."""
        return self._hand_over(iteration)

    def sent(self) -> None:
        """Take note that the push has left."""
        run, self._sending = self._sending, None
        if run is not None and run not in self._out:
            self._free.append(run.place)

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
        if newest is None or newest.closed == self._used:
            return None
        settled = [run for run in self._out if run.round_number <= newest.closed]
        self._out = self._out[len(settled) :]
        accepted = set(newest.accepted)
        inside = [run for run in settled if run.round_number in accepted]
        # The gradient of this very step has not been fed to the optimizer yet.
        replaces = any(run.first == run.last == self._num_own for run in inside)
        subtract = tuple(run.place for run in inside if run.last < self._num_own or run.first < run.last)
        self._free += [run.place for run in settled if run is not self._sending]
        self._used = newest.closed
        self.num_unused = 0
        if settled:
            self._turnaround = self._num_own - settled[-1].pushed_at
        longest = max((run.num_iterations for run in settled), default=1)
        advance, self._used_clock = newest.clock - self._used_clock, newest.clock
        return Use(
            closed=newest.closed,
            subtract=subtract,
            replaces=replaces,
            run_length=longest,
            num_steps=max(1, advance),
            num_own=sum(run.num_iterations for run in inside),
        )

    def end_period(self) -> None:
        """Forget what is out: the average of the parameters takes its place."""
        self.period += 1
        self._begin()

    def restart(self) -> int:
        """Forget what is out: the server is dead, and its successor knows nothing of it. Return the pushes forgotten.

        The own gradients stay what they are, steps of this worker; no global gradient replaces them.
        """
        num_forgotten = len(self._out)
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
        run = self._making = _Run(self._free.pop(), self._num_own, self._num_own, weight)
        return Keep(place=run.place, add=False)

    def _hand_over(self, iteration: int) -> list[Send]:
        run = self._making
        if run is None or not self.can_hurry:
            return []
        self._making = None
        round_number = max(self._last_round, self.closed) + 1
        if round_number > min(self.num_rounds, iteration):
            # Others have ended the period, and rounds were abandoned: this gradient stays a step of this worker.
            self._free.append(run.place)
            return []
        self._sending = run
        self._last_round = run.round_number = round_number
        run.pushed_at = self._num_own
        self._out.append(run)
        weight = run.weight / run.num_iterations
        push = Push(
            worker=self.rank, period=self.period, round_number=run.round_number, iteration=iteration, weight=weight
        )
        return [Send(place=run.place, push=push)]
