"""The main job: a small byte-level GPT that learns Python from the standard library's own source.

``gpt`` is the model and the text, ``train_gpt`` the training loop (plain PyTorch and two lines of Syncline),
and ``display`` what is shown while it runs. ``syncline demo`` starts it; ``examples/train_gpt.py`` is a link to it.
"""

from enum import StrEnum

DEFAULT_STEPS = 400
NUM_SEQUENCES = 32
"""In one batch, over all ranks: whatever their number, step k trains on the same text."""
CHECKPOINT = "checkpoint"
"""Name of the checkpoint in the output folder."""


class Update(StrEnum):
    """The update rules that the demo can show."""

    SHARDED = "sharded"
    ALLREDUCE = "allreduce"
    OVERLAPPED = "overlapped"
    CLUSTERED = "clustered"
    LOCAL_STEPS = "local-steps"
