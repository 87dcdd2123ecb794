"""Which bucket travels on which connection class: measured in the first steps, agreed between ranks, searched."""

from syncline.updates.steering.steering import ClassStatistics, Steering, Unsteered

__all__ = ["Steering", "Unsteered", "ClassStatistics"]
