"""DistributedDataParallel's gradients by a fleet: a communication hook.

A hook must not raise, for that leaves DDP's reducer between two backward passes, and torch's futures cannot carry a
Python error: one that was given to ``Future.set_exception`` counts as a success in C++. So a bucket's future always
gets its bucket, and errors take another way. The hook asks autograd for two calls at the end of the backward pass:

1. before the reducer's own end of the pass, which is asked for after the last hook: wait for the bucket on the thread
   that trains, put the result in place and complete the future;
2. after it, if something failed: raise that. The reducer is whole by then, and the error is the one that was raised.

Annotations are objects here, not text: DDP compares those of a hook.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # the binding declares nothing

from syncline.errors import ConfigurationError
from syncline.pytorch.fleet import Fleet, current_fleet
from syncline.updates.private_torch import at_end_of_backward, backward_pass, is_in_node

Finish = Callable[[], object]


def comm_hook(state: Fleet | dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a DistributedDataParallel model by the collectives of a fleet.

    ``state``: the fleet; None: the current one; or a process group, of Syncline's backend or another. Each bucket's
    all-reduce begins as soon as its gradients are there, and moves beside the rest of the backward pass. Whatever goes
    wrong, a :class:`PeerLostError` for one, is raised by ``backward()``, as itself; gradients are undefined then, and
    the model can be used again after ``zero_grad()``. The fleet must have the ranks of the model's process group.

    >>> def register(ddp):  # a DistributedDataParallel, on a process group of any backend
    ...     ddp.register_comm_hook(fleet, syncline.comm_hook)
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer()
    if backward_pass() == -1:  # DDP's join calls hooks outside of a pass, where an error may be raised at once
        _start(state, buffer)()
        future.set_result(buffer)
        return future
    try:
        finish = _start(state, buffer)
    except Exception as error:
        finish = partial(_raise, error)
    complete = partial(_complete, future, buffer, finish)
    if is_in_node():
        at_end_of_backward(complete)
    else:  # the first pass of a static graph, which the reducer ends as soon as the hooks have returned
        complete()
    return future


def _start(state: Fleet | dist.ProcessGroup | None, buffer: torch.Tensor) -> Finish:
    """Begin the mean of ``buffer`` over all ranks; return what waits for it and puts it in place."""
    if buffer.layout is not torch.strided:
        raise ConfigurationError(
            f"syncline.comm_hook got a gradient of layout {buffer.layout}; it moves dense ones: use sparse=False, or "
            "syncline.distribute(model, optimizer, syncline.AllReduce()) in place of DistributedDataParallel"
        )
    if isinstance(state, dist.ProcessGroup):
        return _start_in_group(state, buffer)
    fleet = current_fleet() if state is None else state
    if not isinstance(fleet, Fleet):
        raise ConfigurationError(
            f"The state of syncline.comm_hook must be a fleet, a process group or None, not {fleet!r}; write "
            "model.register_comm_hook(syncline.init(), syncline.comm_hook)"
        )
    work = fleet.all_reduce(buffer, op="mean", async_op=True)
    assert work is not None, "it was asked for"
    return work.wait


def _start_in_group(group: dist.ProcessGroup, buffer: torch.Tensor) -> Finish:
    buffer.div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None, "this process is in the group"
    wait: Finish = work.wait
    return wait


def _complete(future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, finish: Finish) -> None:
    """End one bucket; what went wrong is raised after the reducer has ended its pass."""
    try:
        finish()
    except BaseException as error:  # an interrupt too leaves a whole reducer
        at_end_of_backward(partial(_raise, error))
    future.set_result(buffer)


def _raise(error: BaseException) -> None:
    raise error
