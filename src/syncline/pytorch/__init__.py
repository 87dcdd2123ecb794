"""The seams to PyTorch: ``init``, ``distribute``, hooks on modules and gradients, checkpoints."""
