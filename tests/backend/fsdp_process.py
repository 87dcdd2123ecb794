"""One rank of four that trains with FSDP1 in each of its ways, on groups of gloo's and on ours, and compares."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

STEPS = 3
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
)


def groups_of(backend: str, strategy: ShardingStrategy) -> Any:
    """Return the group that shards, for a hybrid with the one that replicates: two ranks of four each."""
    if strategy is not ShardingStrategy.HYBRID_SHARD:
        return dist.new_group(backend=backend)
    rank = dist.get_rank()
    sharding, replicating = (
        [dist.new_group(ranks, backend=backend) for ranks in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    return sharding[rank // 2], replicating[rank % 2]


def trained(groups: Any, strategy: ShardingStrategy, *, use_orig_params: bool, precision: Any) -> Iterator[Any]:
    """Train; yield losses, norms of gradients, and the state, whole and in shards that were loaded again."""
    torch.manual_seed(0)
    shard = partial(
        FullyShardedDataParallel,
        process_group=groups,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        mixed_precision=precision,
        device_id=torch.device("cpu"),
    )
    model = shard(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), shard(nn.Linear(9, 3))))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.full((2, 6), (dist.get_rank() + step) / 5)).square().sum()
        loss.backward()
        yield loss.detach()
        yield model.clip_grad_norm_(0.5)
        optimizer.step()
    yield from model.state_dict().values()
    if strategy is not ShardingStrategy.NO_SHARD:
        config = ShardedStateDictConfig()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
            state = model.state_dict()
            yield from (shard.tensor for value in state.values() for shard in value.local_shards())
            model.load_state_dict(state)
    yield from model.state_dict().values()


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 is deprecated, and its checkpoints
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    dist.init_process_group("gloo")
    for strategy in STRATEGIES:
        theirs, ours = groups_of("gloo", strategy), groups_of("syncline", strategy)
        for use_orig_params, precision in itertools.product((True, False), (None, BF16)):
            how: dict[str, Any] = {"use_orig_params": use_orig_params, "precision": precision}
            expected = list(trained(theirs, strategy, **how))
            torch.testing.assert_close(list(trained(ours, strategy, **how)), expected, rtol=1e-5, atol=1e-6)
        print(strategy.name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
