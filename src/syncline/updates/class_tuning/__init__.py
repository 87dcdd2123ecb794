"""Which bucket travels on which connection class: measured in the first steps, agreed between ranks, searched."""

from syncline.updates.class_tuning.tuner import ClassStatistics, ClassTuner, Untuned

__all__ = ["ClassTuner", "Untuned", "ClassStatistics"]
