"""Many steps of an optimizer in a row, each in one kernel for all parameters instead of a dozen for each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_WITH_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@contextlib.contextmanager
def stepping_at_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within this context ``optimizer`` takes torch's fused kernels, in groups where the user left the choice to torch.

    They round otherwise than one operation after another does, in the last bit.
    """
    chosen = [group for group in optimizer.param_groups if _is_served(optimizer, group)]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _is_served(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    """Whether there is a kernel for a group: of torch's own classes (not of who inherits from them), on the CPU.

    The kernels count steps in float32, other steps in float64 where that is the default type.
    """
    is_open = "fused" in group and group["fused"] is None and group.get("foreach") is None
    tensors = group["params"]
    assert isinstance(tensors, list)
    return (
        type(optimizer) in _WITH_KERNELS
        and is_open
        and torch.get_default_dtype() != torch.float64
        and not group.get("differentiable")
        and not isinstance(group["lr"], torch.Tensor)
        and all(tensor.device.type == "cpu" and tensor.is_floating_point() for tensor in tensors)
    )
