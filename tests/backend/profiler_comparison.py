"""One rank that makes each call under ``torch.profiler`` on a group of gloo's and on one of ours, and compares.

Prints a line for each call that shows otherwise; then how many show alike. gloo makes an all-reduce
of a reduce-scatter, so what it shows of the work there is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from syncline.backend import signatures

RANK = int(os.environ["RANK"])
Group = dist.ProcessGroup
Shown = list[tuple[str, Any]]
ones = torch.ones


def calls(group: Group) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each call, on tensors whose shapes tell them apart."""
    is_root = RANK == 0
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    pairs: Any = group
    yield "all_reduce", lambda: dist.all_reduce(ones(4, 3), group=group)
    yield "all_reduce, not waited for at once", lambda: dist.all_reduce(ones(4, 3), group=group, async_op=True).wait()
    yield "all_reduce, under a name of the caller's", lambda: named(lambda: dist.all_reduce(ones(4, 3), group=group))
    yield "all_reduce, sparse", lambda: dist.all_reduce(ones(4).to_sparse(), group=group)
    yield "allreduce_coalesced", lambda: pairs.allreduce_coalesced([ones(4), ones(3)]).wait()
    yield "allreduce_coalesced of one", lambda: pairs.allreduce_coalesced([ones(4)]).wait()
    yield "broadcast", lambda: dist.broadcast(ones(5), 0, group=group)
    yield "reduce", lambda: dist.reduce(ones(5), 0, group=group)
    yield "all_gather", lambda: dist.all_gather([ones(2), ones(2)], ones(2), group=group)
    yield "allgather_coalesced", lambda: pairs.allgather_coalesced([[ones(2)], [ones(2)]], [ones(2)]).wait()
    yield "all_gather_single", lambda: gather(ones(4), ones(2), group=group)
    yield "gather", lambda: dist.gather(ones(2), [ones(2), ones(2)] if is_root else None, 0, group=group)
    yield "scatter", lambda: dist.scatter(ones(2), [ones(2), ones(2)] if is_root else None, 0, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter(ones(2), [ones(2), ones(2)], group=group)
    yield "reduce_scatter_single", lambda: scatter(ones(2), ones(4), group=group)
    yield "all_to_all", lambda: dist.all_to_all([ones(2), ones(2)], [ones(2), ones(2)], group=group)
    yield "all_to_all_single", lambda: dist.all_to_all_single(ones(4), ones(4), group=group)
    yield "barrier", lambda: dist.barrier(group)
    yield "send", lambda: dist.send(ones(3), 1, group=group) if is_root else dist.recv(ones(3), 0, group=group)
    yield "from anyone", lambda: dist.send(ones(3), 1, group=group) if is_root else dist.recv(ones(3), group=group)
    outputs, inputs = [ones(4), ones(2)], [ones(2), ones(1)]
    yield "gathers at once", lambda: pairs.allgather_into_tensor_coalesced(outputs, inputs).wait()
    yield "scatters at once", lambda: pairs.reduce_scatter_tensor_coalesced(inputs, outputs).wait()


def named(call: Callable[[], Any]) -> None:
    """Make a call whose work gets a name, where PyTorch has a way to give it one, from 2.13 on."""
    with getattr(dist, "record_comm", record_function)("of the caller"):
        call()


def shown(call: Callable[[], Any], backend: str) -> Shown:
    """Return names and shapes of what the profiler shows of a call, with a common name in place of the backend's."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    events = [(event.name, event.input_shapes) for event in profiler.events()]
    found = [event for event in events if event[0].startswith(("c10d::", f"{backend}:", "of the caller"))]
    return sorted((name.removeprefix(f"{backend}:"), shapes) for name, shapes in found)


def without_work(name: str, events: Shown) -> Shown:
    return [event for event in events if event[0].startswith("c10d::") or "scatter" not in name or name == "scatter"]


def fail(name: str, _inputs: list[Any]) -> NoReturn:
    raise AssertionError(f"{name} is recorded, and no profiler looks on")


def main() -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=timeout)
    ours = dist.new_group(backend="syncline", timeout=timeout)
    recorded_range, signatures.recorded_range = signatures.recorded_range, fail
    for _, call in calls(ours):
        call()
    signatures.recorded_range = recorded_range
    num_alike = 0
    for (name, theirs), (_, call) in zip(calls(dist.group.WORLD), calls(ours), strict=True):
        expected, found = shown(theirs, "gloo"), shown(call, "syncline")
        is_alike = without_work(name, found) == without_work(name, expected) and len(found) > 1
        num_alike += is_alike
        if not is_alike:
            print(f"{name}: gloo {expected}; ours {found}")
    print(f"alike={num_alike}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
