"""``phase()``: a model of stages, trained by pairs of ranks; what computes, stores and updates them is in ``updates``.

Below ``trainer``, which users call: ``setup``, by which pairs agree on their stages and get ready; ``resume``, what
they go on from; ``scaling``, which losses and steps they refuse.
"""

from syncline.pytorch.phased.trainer import OF_PHASE, PhasedTrainer, phase

__all__ = ["OF_PHASE", "PhasedTrainer", "phase"]
