"""Distributed checkpoints (DCP) of an FSDP2 model on Syncline's process group: saved half-way, and gone on from there.

syncline run --ranks 2 examples/frameworks/dcp.py FOLDER
"""

import sys

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from regression import NUM_STEPS, make_model, make_optimizer, report, train, train_alone
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import syncline  # noqa: F401 - makes the backend known

HALF = NUM_STEPS // 2


def main(folder: str) -> None:
    """Save, load into a new model, go on, and compare with one process that never stopped."""
    dist.init_process_group("syncline")
    rank = dist.get_rank()
    model = fully_shard(make_model())
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, rank, range(HALF))
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)

    model = fully_shard(make_model())
    optimizer = make_optimizer(model.parameters())
    parameters, states = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
    train(model, optimizer, rank, range(HALF, NUM_STEPS))
    report("dcp", rank, model, train_alone(dist.get_world_size()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
