"""How newcomers come into a job that runs: where members listen for them, and how both connect the larger job."""

from typing import TYPE_CHECKING

from syncline.late_imports import late_names

if TYPE_CHECKING:
    from syncline.runtime.joining.growth import Entry, Growth, LargerFabric

__all__ = ["Entry", "Growth", "LargerFabric"]

__getattr__ = late_names(__name__, {"growth": " ".join(__all__)})
