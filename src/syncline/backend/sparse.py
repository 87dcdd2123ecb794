"""The sum of sparse tensors, which gradients of embeddings may be: entries are gathered, and added on each rank."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist

from syncline.errors import ConfigurationError
from syncline.runtime.call import BasicSettings
from syncline.tensors.collectives import TensorCollectives
from syncline.tensors.reductions import ReduceOp
from syncline.tensors.work import TensorWork


def all_reduce_sparse(
    collectives: TensorCollectives,
    tensor: torch.Tensor,
    op: ReduceOp,
    *,
    num_ranks: int,
    **settings: Unpack[BasicSettings],
) -> TensorWork:
    """Make ``tensor``, a sparse COO tensor of one shape on all ranks, the sum of those of all ranks, or their mean.

    It waits until each rank has told how many entries it brings; these then travel in two all-gathers.
    """
    is_mean = op == dist.ReduceOp.AVG
    if tensor.layout is not torch.sparse_coo or not (op == dist.ReduceOp.SUM or is_mean):
        raise ConfigurationError(
            f"Of sparse tensors, those in COO form can be summed or averaged, and not {tensor.layout} with {op}; give "
            "tensor.to_dense()"
        )
    own = tensor.detach().coalesce()
    rows, values = own.indices().t().contiguous(), own.values()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    how: BasicSettings = {**settings, "is_awaited": True}
    collectives.all_gather(counts, torch.tensor([len(rows)]), **how).wait()
    sizes = [int(count) for count in counts]
    all_rows = [rows.new_empty((size, rows.shape[1])) for size in sizes]
    all_values = [values.new_empty((size, *values.shape[1:])) for size in sizes]
    works = [
        collectives.all_gather(outputs, source, **settings)
        for outputs, source in ((all_rows, rows), (all_values, values))
    ]

    def add() -> None:
        total = torch.sparse_coo_tensor(
            torch.cat(all_rows).t(), torch.cat(all_values), tensor.shape, check_invariants=True
        ).coalesce()  # checked, because other ranks say where the entries are
        with torch.no_grad():  # detach() would share the memory of the entries, and not their number
            tensor.copy_(total / num_ranks if is_mean else total)

    return TensorWork.together(works).then(add)
