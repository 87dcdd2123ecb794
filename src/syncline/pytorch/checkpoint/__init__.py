"""Checkpoints that load on any number of ranks and any topology, exactly: state belongs to parameters, not to ranks.

Each rank writes an even part of the model and the optimizer state that it owns, as ranges of each parameter's
elements; together they are whole, so another division of the same elements reads them as well, also a single process
without a fleet, and programs that use ``torch.distributed.checkpoint`` (DCP). Ranks must see the same file system.

This is what users call. Below it, from the top: ``saving`` and ``loading``, which lead the ranks through a save or a
load; ``group``, who they are; ``background``, the threads that write while training goes on; ``storage``, what DCP
writes and reads; ``manifest``, what is said beside; ``state``, what there is to write, as chunks, values and text;
``folder``, what is called how, and which one is the newest. What is large is loaded with the first checkpoint.
"""

from syncline.pytorch.checkpoint.background import CheckpointWork
from syncline.pytorch.checkpoint.loading import Resumption, latest_checkpoint, load_checkpoint, resume
from syncline.pytorch.checkpoint.saving import prepare_save, save_checkpoint

__all__ = [
    "CheckpointWork",
    "Resumption",
    "latest_checkpoint",
    "load_checkpoint",
    "prepare_save",
    "resume",
    "save_checkpoint",
]
