"""The sharded update as users ask for it; :mod:`syncline.updates.sharded_updater` does the work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch

from syncline.arguments import Bounds, Count, check_fields
from syncline.errors import ConfigurationError
from syncline.schedule.replicas import Replicate
from syncline.updates.bucket import DEFAULT_BUCKET_BYTES
from syncline.updates.bucket_schedule import BucketScheduleOptions
from syncline.updates.combinations import COMPRESSED, ELASTIC_WITH_HELPERS, LEAVING, NOBODY_WAITS, Combination
from syncline.updates.compression import Compress, compress
from syncline.updates.elastic_sharded import ElasticShardedUpdater
from syncline.updates.in_backward import InBackwardUpdater
from syncline.updates.inner import check_divisible
from syncline.updates.ownership import Cost, Portions
from syncline.updates.rule import Setting
from syncline.updates.sharded_updater import ShardedUpdater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # loading it takes longer than all of this library


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Each rank updates its own shard of the parameters, and keeps optimizer state for that shard alone.

    ``align``: ``"element"`` divides buckets wherever the topology wants; it needs an optimizer that treats each element
    by itself (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD). ``"parameter"`` gives
    each parameter to one rank whole, in its shape, for any optimizer that treats each parameter by itself (Muon, ...);
    ``cost`` then says from a parameter's shape what its update costs, so that ranks have about their portions of that
    (default: the number of elements; :func:`~syncline.updates.matrix_cost` suits Muon).
    ``portions``: how much each rank owns. ``"balanced"`` leaves every rank at most 1.25 / N of the state, unless that
    makes the predicted step more than 10 % longer; a number, such as 1.25, is a cap that holds whatever it costs: no
    rank owns more than that times 1 / N (with a ``gateway``, N counts those that own any); ``"fastest"`` is what the
    links like best; a mapping gives a number to each host of the topology, of which the ratios count: a host's ranks
    share its part alike. Where the topology says how much memory a host has, its ranks own no more state than that
    holds.
    ``bucket_bytes``: how much moves together, about. ``overlap_forward``: ``step()`` returns before the parameters are
    final, and whoever touches one through PyTorch waits for its bucket, so that the all-gather runs under the next
    forward pass. Memory that was reached before ``step()`` (a ``p.data`` or NumPy array kept over it) is not waited
    for: call ``syncline.synchronize()`` before it is read or written. Models that are compiled or scripted do not
    overlap.
    ``replicate``: parts of the topology that own everything each by itself, so that after the backward pass nothing
    moves between them; each rank keeps its share of one part's state, in place of one of the whole job's. ``"host"``:
    each host; a number: each switch or host so many levels below the root (1: the racks of a core switch); names of
    switches or hosts; groups of ranks, or a ``DeviceMesh`` of two dimensions, the second of which divides; ``"auto"``:
    the level that is predicted to leave least to be moved after the backward pass. All ranks are in one of the parts.
    ``"auto"`` takes no longer in all than without replicas (by 1 % at most), else there are none. Each part steps by
    itself, so parts need machines that compute alike, as ``AllReduce()`` and DDP do. ``portions`` then count within a
    part, 1.25 as a cap that holds; portions of hosts and ``cost`` cannot be given.
    ``spares``: 1 lets a second rank keep each range of the state and make the same steps, on another host, or in
    another rack where that makes the predicted step at most a tenth longer (:mod:`syncline.schedule.spares`), so that
    no rank's loss loses state. Each rank then keeps about 2 / N of the state; the bytes that move are the same, since
    the spare is sent the reduced gradient in place of new parameters. It takes hosts that compute alike. On one host
    the spare is another rank: a process that dies loses nothing, the machine loses all.
    ``step_in_backward``: a bucket is updated within the backward pass, as soon as its reduce-scatter is over, and its
    all-gather goes on while other gradients still come. New values wait beside the old ones until ``step()``, which
    costs memory for a second copy of all parameters and of this rank's state. Hyper-parameters are those at the
    beginning of the backward pass, and what looks at gradients before ``step()`` (clipping, ``GradScaler``, the sum of
    several backward passes) is refused; passes under ``no_sync()`` come before, and are served. A step after parameters
    were written between ``backward()`` and ``step()`` is refused too: all writes that PyTorch counts are seen, and of
    those through ``.data`` what changes one of some 1000 values of a bucket. ``zero_grad()`` drops the update.

    ``compress``: how float32 crosses slow links. ``"int8"`` and ``"int4"`` send a quarter and an eighth of the bytes,
    ``"bf16"`` half, of gradients and of the changes of parameters; ``"auto"`` is ``"int8"`` where the topology's rates
    and the measured speed of coding predict that it saves a third, else ``"off"``. Sums are made in full precision
    inside of each site (the level of the tree for which the predicted time is least) and coded once to their owner.
    The owner codes the difference of its parameters from those that all ranks have, and takes that itself, too. What
    codes lack is added to the next ones, and saved with the optimizer's state (``docs/mechanisms.md``, Fewer bytes).

    Parameters keep their shapes and number types, and end on all ranks with the same bits. After Rajbhandari et al.,
    "ZeRO", 2020, stages 1 and 2. Raises :class:`ConfigurationError` for another ``align`` and for sizes of 0 or less;
    ``distribute()`` raises :class:`UpdateError` for an optimizer that cannot step on pieces; ``step()`` and
    ``backward()`` raise what a collective does, on the training thread, though a thread of its own steps the shard.

    >>> model, optimizer = syncline.distribute(model, optimizer, syncline.Sharded(bucket_bytes=1 << 20))
    >>> model(x).sum().backward(); optimizer.step()
    >>> optimizer.num_state_bytes  # of this rank's shard alone; SGD without momentum keeps nothing
    0
    """

    align: Literal["element", "parameter"] = "element"
    portions: Portions = field(default="balanced", hash=False)
    cost: Cost | None = field(default=None, repr=False)
    bucket_bytes: Count = DEFAULT_BUCKET_BYTES
    compress: Compress = "off"
    overlap_forward: bool = False
    step_in_backward: bool = False
    replicate: Replicate | DeviceMesh | None = None
    spares: Annotated[int, Bounds(0, 1), "0, or 1 for a second owner of each range"] = 0
    combinations: ClassVar[tuple[Combination, ...]] = (
        ELASTIC_WITH_HELPERS,
        LEAVING,
        Combination(
            "elastic=True",
            "if step_in_backward=True: it steps before a pass is committed",
            "leave out one of them",
            when=lambda rule, _: rule.step_in_backward,
        ),
        Combination(
            "elastic=True",
            "as it is: its state would be lost with a rank",
            "take Sharded(spares=1) or AllReduce(), or go back to checkpoints: elastic=Elastic(checkpoint=folder)",
            when=lambda rule, request: not (rule.spares or rule.replicate or request.elastic.checkpoint),
        ),
        Combination(
            "save_on_failure=",
            "of whose state each rank has a part",
            "save checkpoints on the way (save_checkpoint(..., keep=2, wait=False)), or take AllReduce()",
        ),
        NOBODY_WAITS._replace(when=lambda rule, request: not rule.overlap_forward or request.elastic is not None),
        Combination(
            "overlap_forward=True with elastic=",
            "whose step() returns when all parameters are there then",
            "leave out overlap_forward",
            is_refused=False,
            when=lambda rule, _: rule.overlap_forward,
        ),
        *COMPRESSED,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_spares()
        self._check_compress()
        object.__setattr__(self, "replicate", _named_replicas(self.replicate))
        if self.replicate is not None and (isinstance(self.portions, Mapping) or self.cost is not None):
            raise ConfigurationError(
                "replicate divides each replica as its links want it, within portions that are a number; leave out "
                "portions of hosts and cost, or replicate"
            )
        if self.cost is not None and not self.whole_parameters:
            raise ConfigurationError(
                'cost weighs whole parameters, and align="element" divides them; use align="parameter", or no cost'
            )
        if isinstance(self.portions, Mapping):
            if not any(self.portions.values()):
                raise ConfigurationError(f"portions give at least one host more than 0, unlike {self.portions!r}")
            object.__setattr__(self, "portions", dict(sorted(self.portions.items())))

    def _check_spares(self) -> None:
        if self.spares and self.replicate is not None:
            raise ConfigurationError(
                "With replicate each range has an owner in each replica already, which is its spare; leave out spares, "
                "or replicate"
            )
        if self.spares and self.step_in_backward:
            raise ConfigurationError(
                "step_in_backward keeps a second copy of state until step(), which spares would double; leave out one "
                "of them"
            )

    def _check_compress(self) -> None:
        if self.compress != "off" and (self.spares or self.step_in_backward or self.replicate is not None):
            raise ConfigurationError(
                "With compress each range has one owner, who codes what a whole step has changed; leave out "
                'spares, step_in_backward and replicate, or say compress="off"'
            )

    @property
    def whole_parameters(self) -> bool:
        """Whether a parameter has one owner."""
        return self.align == "parameter"

    @property
    def schedule_options(self) -> BucketScheduleOptions:
        """Buckets move by reduce-scatter and all-gather, each range of one owned by one rank."""
        return BucketScheduleOptions(
            is_divided=True,
            whole_parameters=self.whole_parameters,
            portions=self.portions,
            cost=self.cost or math.prod,
            num_copies=2 if self.step_in_backward else 1,
            spares=self.spares,
            is_contiguous=self.compress != "off",
            replicate=self.replicate,  # type: ignore[arg-type]  # a mesh became groups of ranks
        )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UpdateError` if ``optimizer`` cannot step on pieces."""
        check_divisible(optimizer, whole_parameters=self.whole_parameters)

    def start(self, setting: Setting) -> ShardedUpdater:
        """Begin to work on a model, and start the update thread; every rank calls it."""
        compress(setting, self.compress)
        if setting.recover is not None:
            return ElasticShardedUpdater(setting, whole_parameters=self.whole_parameters, portions=self.portions)
        kind = InBackwardUpdater if self.step_in_backward else ShardedUpdater
        return kind(
            setting,
            whole_parameters=self.whole_parameters,
            overlap_forward=self.overlap_forward,
            portions=self.portions,
        )


def _named_replicas(replicate: Replicate | DeviceMesh | None) -> Replicate | None:
    """Return what was given as something that all ranks print alike, a mesh as its groups of ranks."""
    if replicate is None or isinstance(replicate, (str, int)):
        return replicate
    if isinstance(replicate, (list, tuple)):
        return tuple(each if isinstance(each, str) else tuple(map(int, each)) for each in replicate)
    mesh = getattr(replicate, "mesh", None)
    if not isinstance(mesh, torch.Tensor) or mesh.dim() != 2:
        raise ConfigurationError(
            'replicate is "host", "auto", a level of the topology, names of switches or hosts, groups of ranks, or a '
            f"DeviceMesh of two dimensions (the first replicates, the second divides), not {replicate!r}"
        )
    return tuple(tuple(ranks) for ranks in mesh.tolist())
