"""DTensors on a DeviceMesh of Syncline's process group: a product of two matrices of which each rank has a part.

syncline run --ranks 2 examples/frameworks/dtensor.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import syncline  # noqa: F401 - makes the backend known


def main() -> None:
    """Multiply, and compare with one process."""
    dist.init_process_group("syncline")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(6, 8, generator=generator), torch.randn(8, 5, generator=generator)
    by_columns, by_rows = distribute_tensor(left, mesh, [Shard(1)]), distribute_tensor(right, mesh, [Shard(0)])
    partial = by_columns @ by_rows  # each rank has the whole shape, and a part of each sum
    whole = partial.redistribute(mesh, [Replicate()]).to_local()  # an all-reduce
    rows = partial.redistribute(mesh, [Shard(0)])  # a reduce-scatter
    columns = rows.redistribute(mesh, [Shard(1)])  # an all-to-all
    found = [whole, rows.full_tensor(), columns.full_tensor()]  # all-gathers
    difference = max((one - left @ right).abs().max().item() for one in found)
    print(f"dtensor: rank {dist.get_rank()} differs from one process by {difference:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
