"""One of two ranks that runs PyTorch's operators on sharded tensors, as its ``test_dtensor_ops.py`` does.

On gloo each operator that moves something gets the first sample of PyTorch's own list, with the first placements of its
tensors. Where that makes a call there, it is run again on our process groups: results, or the kind of error, are to be
the same. Prints how many operators, cases and errors that were.
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
NAMES = """
_upsample_bilinear2d_aa addmm addmm_decomposed addmv argsort bmm bmm_triton_optimized column_stack
corrcoef cov diag diagonal_scatter equal fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2
fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2
fft_irfftn fft_rfft fft_rfft2 fft_rfftn flip fliplr gather grid_sampler_2d grid_sampler_3d hsplit
linalg_lu_solve linalg_tensorinv linalg_tensorsolve lu_solve max_pool2d_with_indices_backward msort
native_group_norm native_layer_norm nn_functional_adaptive_avg_pool1d nn_functional_adaptive_avg_pool2d
nn_functional_adaptive_avg_pool3d nn_functional_adaptive_max_pool1d nn_functional_adaptive_max_pool2d
nn_functional_adaptive_max_pool3d nn_functional_avg_pool3d nn_functional_channel_shuffle
nn_functional_cross_entropy nn_functional_glu nn_functional_grid_sample nn_functional_group_norm
nn_functional_interpolate_area nn_functional_interpolate_bicubic nn_functional_interpolate_bilinear
nn_functional_interpolate_linear nn_functional_interpolate_nearest nn_functional_interpolate_nearest-exact
nn_functional_interpolate_trilinear nn_functional_layer_norm nn_functional_linear_cross_entropy
nn_functional_local_response_norm nn_functional_max_pool2d nn_functional_max_pool3d
nn_functional_max_unpool2d_grad nn_functional_max_unpool3d nn_functional_max_unpool3d_grad
nn_functional_multi_head_attention_forward nn_functional_nll_loss nn_functional_normalize
nn_functional_triplet_margin_loss nn_functional_upsample_bilinear nn_functional_upsample_nearest scatter
scatter_add slice_scatter sort tensordot tril triu view_as_complex vsplit where
"""
"""Those of the 677 operators of PyTorch 2.13 that made a call in the first six placements, on gloo."""
MOVING = frozenset(NAMES.split())
Case = tuple[str, int]


def cases(mesh: DeviceMesh) -> Iterator[tuple[Case, Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield each operator with its tensors on the mesh, the same ones on all ranks and each time."""
    for operator in op_db:
        if operator.formatted_name not in MOVING:
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
