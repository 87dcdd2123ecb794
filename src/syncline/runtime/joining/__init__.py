"""How newcomers come into a job that runs: where members listen for them, and how both connect the larger job."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.runtime.joining.growth import Admitted, Entry, Growth

__all__ = ["Admitted", "Entry", "Growth"]

__getattr__ = late_names(__name__, {"growth": " ".join(__all__)})
