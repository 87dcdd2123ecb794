"""What the compiled codec makes of numbers, written from its description with PyTorch: the oracle of its tests."""

import torch

BLOCK = 128


def encode(bits: int, values: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``values + error`` and the new error."""
    count = values.numel()
    sums = torch.zeros(-(-count // BLOCK) * BLOCK)
    sums[:count] = values + error
    blocks = sums.view(-1, BLOCK)
    if bits == 16:
        halves = blocks.to(torch.bfloat16)
        lacking = blocks - halves.float()
        lacking[~lacking.isfinite()] = 0.0
        is_nan = halves.isnan()
        stored = halves.view(torch.int16).masked_fill(is_nan, 0x7FC0)
        return stored.view(torch.uint8).reshape(-1).clone(), lacking.reshape(-1)[:count].clone()
    most = 2 ** (bits - 1) - 1
    largest = blocks.abs().amax(1)
    is_finite = blocks.isfinite().all(1)
    is_coded = is_finite & (largest >= 2.0**-100)
    upper = ((largest / most).view(torch.int32) + 0xFFFF) >> 16
    upper = torch.where(is_coded, upper, torch.where(is_finite, 0, 0x7FC0)).to(torch.int16)
    scale = upper.view(torch.bfloat16).float()[:, None]
    inverse = torch.where(is_coded[:, None], 1.0 / scale, torch.zeros(()))
    codes = torch.where(is_coded[:, None], (blocks * inverse).round(), torch.zeros(()))
    lacking = torch.where(is_finite[:, None], blocks - codes * scale, torch.zeros(()))
    numbers = codes.to(torch.int8)
    if bits == 4:
        numbers = (numbers[:, : BLOCK // 2] & 15) | (numbers[:, BLOCK // 2 :] << 4)
    record = torch.cat([upper.view(torch.uint8).view(-1, 2), numbers.view(torch.uint8)], 1)
    return record.reshape(-1), lacking.reshape(-1)[:count].clone()


def decode(bits: int, codes: torch.Tensor, count: int) -> torch.Tensor:
    """Return the numbers that ``codes`` stand for."""
    if bits == 16:
        return codes.view(torch.bfloat16).float()[:count]
    record = codes.view(-1, 2 + BLOCK * bits // 8)
    scale = record[:, :2].reshape(-1).clone().view(torch.bfloat16).float()[:, None]
    numbers = record[:, 2:].clone().view(torch.int8)
    if bits == 4:
        numbers = torch.cat([(numbers << 4) >> 4, numbers >> 4], 1)
    return (numbers.float() * scale).reshape(-1)[:count]
