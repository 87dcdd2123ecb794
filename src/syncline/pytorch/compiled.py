"""Which modules are compiled or scripted: hooks and functions of parameters do not work within them as elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from syncline.updates.private_torch import is_compiled


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the model or a module in it is compiled by ``torch.compile`` or ``torch.jit``, as far as it can tell."""
    return any(isinstance(module, torch.jit.ScriptModule) or is_compiled(module) for module in model.modules())
