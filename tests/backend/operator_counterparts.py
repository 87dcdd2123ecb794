"""One of two ranks that runs all of PyTorch's operators on sharded tensors, as its ``test_dtensor_ops.py`` does.

On gloo each operator of PyTorch's own list gets its first sample, with the first placements of its tensors. Those that
move anything there are run again on our process groups: results, or the kind of error, are to be the same. Prints how
many operators that were.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter
from torch.utils._pytree import tree_leaves

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PLACEMENTS = 6
"""How many ways of placing an operator's tensors are tried: more are the same calls again."""
Case = tuple[str, int]


def cases(mesh: DeviceMesh) -> Iterator[tuple[Case, Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield each operator with its tensors on the mesh, the same ones on all ranks and each time."""
    for operator in op_db:
        if not operator.supports_dtype(torch.float32, "cpu"):
            continue
        torch.manual_seed(0)
        sample = next(iter(operator.sample_inputs("cpu", torch.float32)), None)
        if sample is None:
            continue
        placed = iter(DTensorConverter(mesh, (sample.input, *sample.args), sample.kwargs))
        for number in range(PLACEMENTS):
            try:
                given = next(placed, None)
            except (RuntimeError, NotImplementedError):  # tensors that cannot be placed
                break
            if given is None:
                break
            yield (operator.formatted_name, number), operator.op, *given


def outcome(operator: Any, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Return all parts of the result, or the kind of error."""
    torch.manual_seed(1)
    try:
        return tree_leaves(operator(*given, **named))
    except Exception as error:
        return [type(error).__name__]


def own_part(value: Any) -> Any:
    """Return what this rank has of a tensor: what is still to be added, too."""
    return value.to_local().detach().clone() if isinstance(value, DTensor) else value


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store, *_ = next(dist.rendezvous("env://"))
    results: dict[str, dict[Case, list[Any]]] = {"gloo": {}, "syncline": {}}
    for backend, found in results.items():
        where = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, store=where, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60))
        for case, operator, given, named in cases(init_device_mesh("cpu", (WORLD,))):
            if backend == "gloo":
                with CommDebugMode() as calls:
                    result = outcome(operator, given, named)
                if calls.get_total_counts():
                    found[case] = [own_part(one) for one in result]
            elif case in results["gloo"]:
                found[case] = [own_part(one) for one in outcome(operator, given, named)]
        dist.destroy_process_group()
    theirs, ours = results.values()
    assert list(theirs) == list(ours)
    for case, expected in theirs.items():
        for one, other in zip(ours[case], expected, strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text, c=case: f"{c}: {text}")
            else:
                assert one == other, case
    print(len({name for name, _ in ours}), len(ours), sum(isinstance(one[0], str) for one in ours.values()))


if __name__ == "__main__":
    main()
