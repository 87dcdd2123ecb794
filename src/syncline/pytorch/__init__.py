"""The seams to PyTorch: ``init``, ``distribute``, hooks on modules and gradients, checkpoints.

Users find all of it in ``syncline`` itself; nothing else here is public.
"""

__all__: list[str] = []
