"""The small calls of an elastic training: what one epoch began and did not end is ended in the next.

When an epoch ends, some ranks may have the result of a call that others were still waiting for. So results are kept
until no rank can miss them, and in the new epoch whoever lacks one gets it from the lowest rank that has it. What
nobody has is begun again among the members that are left. Thus all of them have the same results of the same calls.

A *commit* is the call that ends a pass: it begins when a rank's part of the pass is over. Who has its result knows that
every member was as far; then what was called before it is over everywhere, and need not be kept. The report of a pass
is such a call: it is told when the reductions of its pass are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from syncline.members import LOSSES
from syncline.members.job_record import NO_FLAGS, Flags
from syncline.runtime.communicator import Communicator
from syncline.runtime.work import Work
from syncline.schedule import Collective
from syncline.updates.control import ControlStream
from syncline.updates.report import Notes, PendingReport, StepReports, encode

Recover = Callable[[BaseException], None]
"""Called on the training thread with what a collective of this epoch ended with: raises it if it is no loss, or if this
rank does not go on. Else it returns in a new epoch: ``collectives`` move buckets among the members that are left, and
:meth:`~syncline.updates.rule.Updater.resume` was called."""
Positions = tuple[int, tuple[int, ...]]
"""The number of the first call that is kept, and for each from there on the bytes of its result; -1 for one without."""


@contextmanager
def recovering(recover: Recover) -> Iterator[None]:
    """Let what is called within end with the loss of ranks: who calls it then looks where it stands, and goes on."""
    try:
        yield
    except LOSSES as error:
        recover(error)


class ElasticCall(Work):
    """A call that outlives its epoch; the ``tensor`` holds the result."""

    def __init__(
        self,
        stream: ElasticControlStream,
        label: str,
        make: Callable[[], torch.Tensor],
        *,
        root: int | None,
        is_commit: bool = False,
    ) -> None:
        self.label = label
        self.number = stream.num_calls
        self.make_by_waiting(None)
        self.is_commit = is_commit
        self.is_abandoned = False
        """Whether it is a commit that nobody has the result of, from an epoch that is over."""
        self.tensor = torch.empty(0)
        self._make_tensor = make
        self._root = root
        self._recover = stream.recover
        self._resolved = False
        self._work: Work | None = None

    def __repr__(self) -> str:
        return f"<ElasticCall {self.label}: {'done' if self.is_complete else 'under way'}>"

    @property
    def is_complete(self) -> bool:
        """Whether the result is there."""
        return self._resolved or (self._work is not None and self._work.done() and self._work.exception() is None)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._resolved or (self._work is not None and self._work.done())

    def exception(self) -> BaseException | None:
        """Return what went wrong, if this epoch ended before it."""
        return None if self._resolved or self._work is None else self._work.exception()

    def wait_in_epoch(self) -> None:
        """Wait for the result; raises what it ended with if this epoch ended before it."""
        if not self._resolved:
            assert self._work is not None, "a call is begun before it is waited for"
            self._work.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the result, if need be in a later epoch; raises what is no loss, and where this rank stops."""
        assert timeout_s is None, "a call that may go on in a later epoch has its own deadlines"
        while not self.is_complete:
            with recovering(self._recover):
                self.wait_in_epoch()

    def begin(self, start: Callable[[torch.Tensor, str, int | None], Work]) -> None:
        """Begin it, or begin it again."""
        self.tensor = self._make_tensor()
        self._work = start(self.tensor, self.label, self._root)

    def resolve(self, result: torch.Tensor) -> None:
        """Take over the bytes of the result that another rank has."""
        assert self.tensor.numel() * self.tensor.element_size() == result.numel(), f"{self.label} has another size"
        if result.numel():
            self.tensor.view(-1).view(torch.uint8).copy_(result)
        self._resolved = True


class ElasticControlStream(ControlStream):
    """A control stream that goes on in the next epoch; made on the communicator of the current one.

    ``recover`` is called on the training thread when a call has ended with a loss (see
    :data:`Recover`); what it does moves this stream: :meth:`enter`, then :meth:`settle`.
    ``num_places``: how many ranks the fabric has, members or not. ``job`` is the communicator of all members, where
    this is one of some of them.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        stream: int,
        num_places: int,
        recover: Recover,
        job: Communicator | None = None,
    ) -> None:
        super().__init__(communicator, stream=stream)
        self.recover = recover
        self._num_places = num_places
        self._job = job
        self._first = 0
        self._kept: list[ElasticCall] = []
        self._early: dict[int, torch.Tensor] = {}
        """By its number, the result of a call that others have made already, and this rank has not."""

    is_alone = False
    """Others may come, where the job grows."""

    @property
    def members(self) -> tuple[int, ...]:
        """The job's numbers of the ranks."""
        members = self._communicator.members
        return members if self._job is None else tuple(self._job.members[rank] for rank in members)

    @property
    def num_calls(self) -> int:
        """How many calls were made so far."""
        return self._first + len(self._kept)

    # What a training calls.

    def start_sum(
        self,
        values: torch.Tensor,
        label: str,
        *,
        step: int | None = None,  # noqa: ARG002 - a call that outlives an epoch is known by its number
    ) -> Work:
        """Begin to replace ``values`` by their sum over all members."""
        given = values.clone()

        def make() -> torch.Tensor:
            return values.copy_(given)

        return self._start(label, make)

    def sum_of(self, make: Callable[[], torch.Tensor], label: str) -> torch.Tensor:
        """Return the sum over all members of what ``make`` returns on each: for the members that there are then."""
        call = self._start(label, make)
        call.wait()
        return call.tensor

    def start_broadcast(self, tensor: torch.Tensor, label: str, *, root: int = 0) -> Work:
        """Begin to replace ``tensor`` by that of ``root``, or of the first member if that one is lost meanwhile."""
        given = tensor.clone()

        def make() -> torch.Tensor:
            return tensor.copy_(given)

        return self._start(label, make, root=self.members[root])

    @property
    def _place(self) -> tuple[int, int]:
        return self.members[self.rank], self._num_places

    def start_commit(self, make: Callable[[], torch.Tensor], label: str) -> ElasticCall:
        """Begin the call that ends a pass. In a later epoch it is abandoned if nobody has its result."""
        return self._start(label, make, is_commit=True)

    # What moves it to another epoch.

    def positions(self) -> Positions:
        """Return what this rank has of the calls that others may miss; none of them goes on any more."""
        sizes = [call.tensor.numel() * call.tensor.element_size() if call.is_complete else -1 for call in self._kept]
        return self._first, tuple(sizes)

    def enter(
        self, communicator: Communicator, *, stream: int, num_places: int, job: Communicator | None = None
    ) -> None:
        """Make calls on another communicator from now on."""
        self._communicator, self.number, self._num_places, self._job = communicator, stream, num_places, job

    def settle(self, told: Sequence[Positions], control: ControlStream) -> None:
        """Let every member have the results that any has; the others' positions were ``told``, in rank order."""
        end = max(first + len(sizes) for first, sizes in told)
        for number in range(min(first for first, _ in told), end):
            sizes = [_size_of(number, one) for one in told]
            holders = [(rank, size) for rank, size in enumerate(sizes) if size is not None and size >= 0]
            if holders and -1 in sizes:
                self._take_over(number, *holders[0], control)

    def begin_again(self) -> None:
        """Begin the calls that nobody has the result of."""
        for call in tuple(self._kept):
            if call.is_complete:
                continue
            if call.is_commit:
                assert self._kept[-1] is call, "who waits for a commit calls nothing else"
                self._kept.pop()
                call.is_abandoned = True
            else:
                call.begin(self._begin)

    def forget(self, before: int) -> None:
        """Keep nothing of what is complete and has a lower number: no member can miss it any more."""
        while self._kept and self._first < before and self._kept[0].is_complete:
            self._kept.pop(0)
            self._first += 1

    def _start(
        self, label: str, make: Callable[[], torch.Tensor], *, root: int | None = None, is_commit: bool = False
    ) -> ElasticCall:
        call = ElasticCall(self, label, make, root=root, is_commit=is_commit)
        early = self._early.pop(call.number, None)
        self._kept.append(call)
        if early is None:
            call.begin(self._begin)
        else:
            call.tensor = make()
            call.resolve(early)
        return call

    def _begin(self, tensor: torch.Tensor, label: str, root: int | None) -> Work:
        if root is None:
            return self._submit(Collective.ALL_REDUCE, tensor, label, root=0)
        members = self.members
        rank = members.index(root) if root in members else 0
        return self._submit(Collective.BROADCAST, tensor, label, root=rank)

    def _take_over(self, number: int, holder: int, num_bytes: int, control: ControlStream) -> None:
        place = number - self._first
        call = self._kept[place] if place < len(self._kept) else None
        result = torch.empty(num_bytes, dtype=torch.uint8)
        if control.rank == holder and num_bytes:
            assert call is not None, "who holds a result has made the call"
            result.copy_(call.tensor.reshape(-1).view(torch.uint8))
        control.start_broadcast(result, f"result of call {number}", root=holder).wait()
        if call is None:
            self._early[number] = result
        elif not call.is_complete:
            call.resolve(result)


def _size_of(number: int, positions: Positions) -> int | None:
    """Return the bytes of a result, -1 if the call is not complete or not made; None if it is over and forgotten."""
    first, sizes = positions
    if number < first:
        return None
    return sizes[number - first] if number - first < len(sizes) else -1


class CommitReport(PendingReport):
    """A report that is not under way until :meth:`commit`."""

    def __init__(
        self,
        control: ElasticControlStream,
        own: tuple[float, tuple[bool, ...], tuple[float, ...]],
        expected: float,
        *,
        on_commit: Callable[[ElasticCall], None],
        flags: Callable[[], Flags],
    ) -> None:
        self._control = control
        self._own = own
        self._on_commit = on_commit
        self._own_flags = flags
        self._call: ElasticCall | None = None
        self._stream: int | None = None
        """That of the epoch in which it was told."""
        self._expected = expected
        self._num_notes = len(own[2]) + len(NO_FLAGS)
        self._num_noted = 0
        self._totals = torch.empty(0)

    @property
    def is_done(self) -> bool:
        """Whether the pass is committed."""
        if self._call is None or not self._call.is_complete:
            return False
        self._totals = self._call.tensor
        return True

    def wait(self) -> None:
        """Return when the pass is committed: who asks comes after that."""
        assert self.is_done, "a pass is committed before anybody reads its report"

    @property
    def notes(self) -> Notes:
        """The notes of each rank, without the flags."""
        return tuple(row[: -len(NO_FLAGS)] for row in super().notes)

    @property
    def flags(self) -> Flags:
        """What the first member has told beside its notes; zeros while the pass is not committed.

        Zeros too once members are lost: an attempt that was theirs is over.
        """
        if not self.is_done or self._stream != self._control.number:
            return NO_FLAGS
        begun, decided = super().notes[0][-len(NO_FLAGS) :]
        return int(begun), int(decided)

    def commit(self) -> None:
        """Tell it, and wait until all members have."""
        if self._call is None or self._call.is_abandoned:
            self._call = self._control.start_commit(self._make, "report of a backward pass")
        self._call.wait_in_epoch()
        self._on_commit(self._call)

    def _make(self) -> torch.Tensor:
        self.ranks, self._stream = self._control.members, self._control.number
        self._num_noted = self._num_notes * len(self.ranks)
        weight, present, notes = self._own
        return encode(self._control, weight, present, (*notes, *self._own_flags()))


class ElasticReports(StepReports):
    """The reports of a model's passes in an elastic job; ``on_commit`` is told of each that is committed."""

    def __init__(
        self, control: ElasticControlStream, on_commit: Callable[[ElasticCall], None], flags: Callable[[], Flags]
    ) -> None:
        super().__init__(control)
        self._elastic = control
        self._on_commit = on_commit
        self._own_flags = flags

    @property
    def flags(self) -> Flags:
        """What the first member has told with the last pass."""
        return self._last.flags if isinstance(self._last, CommitReport) else NO_FLAGS

    def start(
        self,
        weight: float,
        expected: float,
        present: Sequence[bool],
        notes: Sequence[float],
        *,
        step: int,  # noqa: ARG002 - a call that outlives an epoch may be of a later step's
    ) -> PendingReport:
        """Make the report of a pass; :meth:`CommitReport.commit` tells it."""
        own = weight, tuple(present), tuple(notes)
        self._last = CommitReport(self._elastic, own, expected, on_commit=self._on_commit, flags=self._own_flags)
        return self._last
