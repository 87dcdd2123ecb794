"""What an update rule is: it turns gradients into parameters, and knows nothing of modules, hooks or autograd.

A *rule* is what the user writes: a frozen description such as ``Sharded(bucket_bytes=...)``. It starts an *updater*,
which does the work for one model. The seams to PyTorch call the updater, on the training thread, in this order:

    wait_parameters     before something reads the parameters of some buckets
    carry               before the first gradient of a pass, if gradients are divided: which of the passes before add up
    begin_backward      before the first gradient of a pass
    weigh               after that: what this rank's gradients count in the mean
    reduce              when all gradients of one bucket are there, in any order of buckets
    finish_backward     when no more gradients will come
    step                when the user calls ``optimizer.step()``; or discard, when they drop the gradients
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from syncline.members.job_record import Flags
from syncline.topology import Topology
from syncline.updates.bucket import Bucket, placed
from syncline.updates.bucket_collectives import BucketCollectives
from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.class_tuner import ClassTuner
from syncline.updates.control import ControlStream
from syncline.updates.divided import DividedGradients
from syncline.updates.elastic_calls import ElasticCall, Recover
from syncline.updates.inner import check_is_served
from syncline.updates.report import LocalReports, PendingReport, StepReports
from syncline.updates.state import StateEntry, StateSource, load_parameter_state, num_state_bytes, parameter_entries


class NonfiniteOrigin(NamedTuple):
    """Where NaN or infinity began, as the rank told that made it; the earliest is the smallest."""

    step: int
    rank: int
    position: int
    """Of the parameter, ``slot.position``."""


class MemberNews(NamedTuple):
    """What was told of the job's members at the end of a period, alike on all that go on."""

    flags: Flags
    lost: tuple[int, ...]
    """Ranks that the lowest of them held lost."""


class GrowthAgreement(NamedTuple):
    """What the ranks of a larger job have agreed on before they go over to it."""

    groups: Sequence[Sequence[int]]
    """Ranks with the same optimizer state: a newcomer takes it from a member of its own group, if there is one."""
    begins_with: Any = None
    """What this rank's next updater begins with."""


class Newcomers(Protocol):
    """Those that want to come into a job whose ranks meet at the ends of periods."""

    @property
    def elders(self) -> tuple[int, ...]:
        """The ranks that were members before others came in just now; none if nobody did."""

    def flags(self) -> Flags:
        """Return what this rank tells of them at the end of a period."""

    def note_loss(self, rank: int) -> None:
        """Let nobody in until the end of a period has told all of this loss; from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a rule works on: the same on all ranks, but for the values in the optimizer and the tensors.

    Each bucket's ``parameters`` and ``gradients`` are flat tensors of ``bucket.plan.num_elements``, of one number type
    and on one device.

    >>> model, optimizer = syncline.distribute(model, optimizer)
    >>> [bucket.plan.num_elements for bucket in optimizer.training.updater.buckets]  # what its setting had
    [10]
    """

    buckets: tuple[Bucket, ...]
    optimizer: torch.optim.Optimizer
    """The user's optimizer; its ``param_groups`` stay live."""
    collectives: BucketCollectives
    """Moves the buckets and small vectors between the ranks."""
    tuner: ClassTuner
    """Gives buckets their connection classes; a rule whose forward passes wait for parameters lets it watch them."""
    reserve_streams: Callable[[int], range] = lambda _: range(0)
    """Takes streams for calls of groups of ranks; every rank takes as many."""
    recover: Recover | None = None
    """In an elastic job (``distribute(..., elastic=True)``): goes on after a loss; see :meth:`Updater.resume`."""
    reports: StepReports | None = None
    """In an elastic job: what tells the others of each pass, and commits it."""
    start_commit: Callable[[str], ElasticCall] | None = None
    """In an elastic job: begins a commit of that label."""
    note_calls: Callable[[], Callable[[], None]] | None = None
    """In an elastic job: notes which small calls were made; what it returns is called once all members made them."""
    has_checkpoints: bool = False
    """In an elastic job: whether it can go back to a checkpoint where state is lost; see :meth:`Updater.go_back`."""
    newcomers: Newcomers | None = None
    """In an elastic job: who may come in, with rules that tell of that themselves."""
    begins_with: Any = None
    """Where the job has just grown: what :meth:`Updater.meet` said."""


class Updater(ABC):
    """An update rule at work on one model.

    All is called on the training thread: in a step :meth:`wait_parameters`, :meth:`carry`, :meth:`begin_backward`,
    :meth:`reduce` for each bucket, :meth:`finish_backward`, then :meth:`step` or :meth:`discard`. What every rank calls
    is a collective, and raises :class:`PeerLostError` or :class:`DeadlineError` where a rank does not come. Positions
    are ``slot.position`` of the buckets' plans, bucket numbers ``bucket.index``.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.AllReduce())
    >>> updater = optimizer.training.updater
    >>> updater.is_synchronous, updater.iteration
    (True, 0)
    """

    def __init__(self, setting: Setting) -> None:
        self.buckets = setting.buckets
        self.optimizer = setting.optimizer
        self.collectives = setting.collectives
        self.step_number = 0
        self._reports = setting.reports
        self._news: MemberNews | None = None

    is_mid_step = False
    """Whether the last step was broken off in its middle, so that what this rank has is not of one step."""

    is_synchronous = True
    """Whether every rank makes every step with all others; if not, nothing of a step may wait for another rank."""

    defers_parameters = True
    """Whether parameters may become final only after ``step()`` has returned, so that who reads them has to wait."""

    takes_closures = False
    """Whether the user's optimizer may evaluate the model within its step: all ranks then have the same gradients."""

    takes_sparse_gradients = False
    """Whether the user's optimizer may be shown sparse gradients."""

    steps_in_backward = False
    """Whether the backward pass makes the new parameters already, so that what is written after it would be lost."""

    keeps_own_state = False
    """Whether ranks' optimizer state differs, so that each saves its own and takes that back."""

    is_in_first_replica = True
    """Whether this rank's part of the state is the one to be saved, where several parts of the job have the same."""

    is_server = False
    """Whether this rank only serves the others: it calls :meth:`serve`, and neither trains nor steps."""

    divides_gradients = False
    """Whether each rank has only its own part of the combined gradients, which :attr:`divided_gradients` stands for."""

    @property
    def rule_name(self) -> str:
        """What users call its rule, for errors: variants, as in elastic jobs, have the same with a word before it."""
        names = [kind.__name__.removesuffix("Updater") for kind in type(self).__mro__]
        return min((name for name in names if name and names[0].endswith(name)), key=len, default="this rule")

    @property
    def reporting_ranks(self) -> Sequence[int]:
        """The ranks that tell each other of every pass: all, or this one alone."""
        return range(self.collectives.world_size) if self.is_synchronous else (self.collectives.rank,)

    @property
    def shares_buffers(self) -> bool:
        """Whether ranks go on with equal buffers: after each step, or, if it is not synchronous, after each period."""
        return self.is_synchronous

    @property
    def nonfinite_origin(self) -> NonfiniteOrigin | None:
        """Where another rank told that NaN or infinity began, with rules whose reports are each rank's own."""
        return None

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on in a new epoch where ranks are lost."""
        return self._reports is not None

    @property
    def streams(self) -> list[range]:
        """The streams of this epoch that it has taken itself, of an elastic job."""
        return []

    @property
    def divided_gradients(self) -> DividedGradients | None:
        """The combined gradients, if each rank has only its own part of them; None if every rank has them all."""
        return None

    @property
    def dividing(self) -> Updater:
        """The updater whose ranks each have a part of gradients and state: this one, or that of a party within it."""
        return self

    @abstractmethod
    def begin_backward(self) -> None:
        """Make ready for the gradients of a new step; raises what went wrong since the last one."""

    def weigh(self, weight: float, expected: float) -> None:  # noqa: B027 - most rules learn it from the report
        """Take this rank's weight in the pass that begins, and the sum over ranks that it is divided by for now."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> None:
        """Start to combine a bucket whose gradients, weighted by this rank's samples, are complete.

        Its ``gradients`` are the updater's from here to :meth:`finish_backward`. Ranks may come in other orders.
        """

    @abstractmethod
    def finish_backward(self, report: PendingReport) -> Sequence[bool] | None:
        """End the backward pass; ``report`` tells what the ranks contributed.

        Returns for each parameter (by position) whether ``p.grad`` now exists; None if gradients stay divided.
        """

    @abstractmethod
    def step(self) -> None:
        """Update the parameters from the combined gradients, or begin to; every rank calls it.

        The values in ``optimizer.param_groups`` count as they are now. Raises what went wrong since the last step.
        """

    def step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """Step an optimizer that evaluates the model itself, and return its loss; only if :attr:`takes_closures`."""
        raise NotImplementedError

    def carry(self, kept: Sequence[bool]) -> None:  # noqa: B027 - where ranks have whole gradients, PyTorch adds them up
        """Let the next pass add to the divided gradients of these parameters (by position), and forget the others."""

    def drop(self, positions: Sequence[int]) -> None:  # noqa: B027 - as above
        """Leave these parameters out of the next step: their divided gradients were dropped by the user."""

    def discard(self) -> None:  # noqa: B027 - most rules keep nothing
        """Forget the combined gradients, if any are kept; every rank does so at the same point."""

    def wait_parameters(self, buckets: Iterable[int]) -> None:  # noqa: B027 - most rules defer nothing
        """Wait until the parameters of these buckets, by number, are final; raises what went wrong meanwhile."""

    def synchronize(self) -> None:  # noqa: B027 - as above
        """Wait until all parameters are final; raises what went wrong since the last step. No other rank is needed."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the combined gradients to a global norm of at most ``max_norm``; every rank calls it.

        Returns what the norm was, a scalar tensor in the gradients' number type. ``norm_type`` is its p, ``inf``
        included. With ``error_if_nonfinite`` a norm that is not finite raises.
        """

    def end_period(self) -> None:  # noqa: B027 - with most rules all ranks have the same parameters after every step
        """Make the parameters of all ranks equal now, for rules that let them differ; every rank calls it."""

    def take_news(self) -> MemberNews | None:
        """Return once what was told of members when a period ended; None if none has, or a rule tells nothing there."""
        news, self._news = self._news, None
        return news

    def meet(self, control: ControlStream, topology: Topology, num_old: int) -> GrowthAgreement:  # noqa: ARG002 - most agree on nothing
        """Agree on how to go on in a larger job of ``topology``, whose ranks up to ``num_old`` are those of this one.

        Also on a rank that comes in; ``control`` is of all of them. After a loss there this updater goes on.
        """
        return GrowthAgreement(groups=[range(topology.num_ranks)])

    def withdraw(self) -> None:  # noqa: B027 - with most rules all ranks have the same where others may come in
        """Let parameters be what all ranks have alike, before a larger job begins; this rank's own are kept."""

    def alike(self) -> list[torch.Tensor]:
        """Return what all ranks have alike beside parameters and the optimizer's state, which newcomers are given."""
        return []

    def go_on_after(self, before: Updater, *, has_come: bool) -> None:  # noqa: B027 - most rules need nothing of it
        """Go on in a larger job after ``before``, which worked on the same model and was withdrawn.

        ``has_come``: it did so alone, and this rank has been given what the members have.
        """

    def serve(self) -> None:
        """Serve until all ranks that train have left, and return; only if :attr:`is_server`."""
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027 - most rules have nothing to do
        """Make the parameters of all ranks equal before the fleet closes, for rules that let them differ."""

    def resume(self) -> None:
        """Go on in a new epoch, on the training thread within ``setting.recover``; ``collectives`` are the new ones.

        Where a pass is under way whose report is not committed, its results do not count, whatever has arrived: begin
        its reductions again, from this rank's own gradients, and wait for none. Called again if another rank is lost.
        """
        raise NotImplementedError

    def divide_anew(self) -> None:  # noqa: B027 - most rules divide nothing
        """Go on, between two steps, by other schedules than before, which ``collectives`` have by now; a collective."""

    def make_reports(self) -> StepReports | LocalReports:
        """Return what tells the others of each pass."""
        if self._reports is not None:
            return self._reports
        return StepReports(self.collectives.control) if self.is_synchronous else LocalReports()

    @property
    def iteration(self) -> int:
        """Steps that the fleet has made: where ranks differ in speed, a slow one leaves numbers out."""
        return self.step_number

    def go_on_from(self, iteration: int) -> None:
        """Count from there on: so many steps were made up to the checkpoint that was loaded, on every rank."""
        self.step_number = iteration

    @property
    def mean_staleness(self) -> float:
        """How many iterations late the others' gradients are used, on average; 0 where all step together."""
        return 0.0

    def statistics(self) -> object | None:
        """Return what this rule counts beside the fleet's statistics, as a frozen record; None if nothing."""
        return None

    def progress(self) -> str:
        """Say in a few words how this rule fares, for a line of progress; empty if there is nothing to say."""
        return ""

    @property
    def checkpoint_writer(self) -> int | None:
        """The rank that saves checkpoints by itself, where not all can be asked to; None if they do it together."""
        return None

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer state that this rank keeps, by the tensors that are stepped."""
        return self.optimizer.state

    @property
    def whole_state(self) -> MutableMapping[torch.Tensor, Any]:
        """What of it every rank keeps whole, by parameter; what is written there counts, with rules that keep some."""
        return {}

    @property
    def num_state_bytes(self) -> int:
        """Bytes of the optimizer state that this rank keeps."""
        return num_state_bytes(self.state)

    @abstractmethod
    def state_entries(self) -> list[StateEntry]:
        """Return the pieces of optimizer state that this rank owns; waits until the state is final."""

    def kept_entries(self) -> list[StateEntry]:
        """Return the pieces of optimizer state that are on this rank, also those that another one saves."""
        return self.state_entries()

    @abstractmethod
    def load_state(self, source: StateSource) -> None:
        """Replace the optimizer state by what ``source`` has of it; keep what is owned."""

    @abstractmethod
    def close(self) -> None:
        """Release threads; what is under way is given up."""

    def release(self) -> None:
        """Let go of the memory, after a close: another updater is in its place."""
        for bucket in self.buckets:
            bucket.release()


# Update rules where every rank steps the whole model with the user's own optimizer, inside ``step()``.
#
# Then parameters are final when ``step()`` returns, gradients are clipped as torch does it, and the whole state is at
# hand on each rank. What is left to such a rule is how gradients become the ones that are stepped on.


class WholeRule:
    """What rules have in common whose buckets are not divided, and whose ranks step the user's optimizer as it is."""

    __slots__ = ()

    @property
    def schedule_options(self) -> BucketScheduleOptions:
        """Buckets move whole, if a collective moves them; else this is the cheapest to plan."""
        return BucketScheduleOptions(is_divided=False)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if the optimizer wants a closure."""
        check_is_served(optimizer)


class WholeUpdater(Updater):
    """An updater whose ranks each step all parameters and keep all state; nothing lies between backward and step."""

    defers_parameters = False

    @property
    def whole_state(self) -> MutableMapping[torch.Tensor, Any]:
        """All of it."""
        return self.optimizer.state

    def progress(self) -> str:
        """Say in a line what this rule counts; empty if that is nothing."""
        counted = self.statistics()
        return "" if counted is None else str(counted)

    def clip_grad_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip the gradients as they stand when ``backward()`` has returned."""
        tensors = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @property
    def saves_state(self) -> bool:
        """Whether this rank saves the whole state; where ranks differ in state, rank 0's is kept."""
        return self.collectives.rank == 0

    def state_entries(self) -> list[StateEntry]:
        """Return what of the whole state this rank saves."""
        return self.kept_entries() if self.saves_state else []

    def kept_entries(self) -> list[StateEntry]:
        """Return the whole state."""
        return [
            entry
            for _, slot, tensor in placed(self.buckets)
            for entry in parameter_entries(slot, self.whole_state.get(tensor, {}))
        ]

    def load_state(self, source: StateSource) -> None:
        """Take the whole state."""
        self.whole_state.clear()
        for _, slot, tensor in placed(self.buckets):
            state = load_parameter_state(source, slot, tensor)
            if state:
                self.whole_state[tensor] = state


class UpdateRule(Protocol):
    """How parameters change from gradients: the user's choice, checked when it is made.

    A frozen dataclass does; it is the same on all ranks, and may start any number of updaters, one for each model.
    What it refuses when it is made is a :class:`ConfigurationError`.

    >>> def start(rule: syncline.updates.UpdateRule, setting: syncline.updates.Setting) -> syncline.updates.Updater:
    ...     rule.check(setting.optimizer)
    ...     return rule.start(setting)
    """

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket's parameters, about: no parameter is divided."""

    @property
    def schedule_options(self) -> BucketScheduleOptions:
        """How buckets are to move."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if this rule cannot serve ``optimizer``; nothing was changed yet."""

    def start(self, setting: Setting) -> Updater:
        """Begin to work on a model whose parameters are in buckets; every rank calls this, on the training thread."""
