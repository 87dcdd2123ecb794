"""What a collective of ``torch.distributed`` can take: refused here, on the rank that asks, with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.errors import ConfigurationError
from syncline.tensors.device_copies import refuse_capture


def check_tensors(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ConfigurationError` if one of ``tensors`` cannot be moved, or if their types differ."""
    if any(tensor.is_cuda for tensor in tensors):
        refuse_capture(call)
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ConfigurationError(
                f"{call} moves dense tensors, not {kind} ones; give tensor.to_dense(), or its values and indices"
            )
        if tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized"
            raise ConfigurationError(f"{call} moves numbers, which a {kind} tensor does not hold; convert it first")
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ConfigurationError(f"{call} needs tensors of one number type, not of {names}; convert them")


def check_one_for_each_rank(call: str, name: str, tensors: Sequence[torch.Tensor], num_ranks: int) -> None:
    """Raise :class:`ConfigurationError` if there are not as many ``tensors`` as ranks."""
    if len(tensors) != num_ranks:
        raise ConfigurationError(f"{call}: {name} needs one tensor for each of {num_ranks} ranks, not {len(tensors)}")


def check_same_size(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise :class:`ConfigurationError` if ``tensors`` differ in their number of elements."""
    sizes = sorted({tensor.numel() for tensor in tensors})
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{call} needs tensors of one size, not of {', '.join(map(str, sizes))} elements; pad them, or call "
            "all_gather, reduce_scatter or all_to_all, which take several"
        )


def split_sizes(call: str, tensor: torch.Tensor, splits: Sequence[int], num_ranks: int) -> list[int]:
    """Return how many elements of ``tensor`` belong to each rank; ``splits`` along dimension 0, none: equal ones."""
    num_rows = tensor.size(0) if tensor.ndim else 1
    if not splits:
        if num_rows % num_ranks:
            raise ConfigurationError(
                f"{call}: dimension 0 has {num_rows} rows, which {num_ranks} ranks cannot divide; give split sizes"
            )
        splits = [num_rows // num_ranks] * num_ranks
    if len(splits) != num_ranks or min(splits) < 0 or sum(splits) != num_rows:
        raise ConfigurationError(
            f"{call}: split sizes are {num_ranks} numbers of rows, {num_rows} together, not {list(splits)}"
        )
    num_columns = tensor.numel() // num_rows if num_rows else 0
    return [split * num_columns for split in splits]
