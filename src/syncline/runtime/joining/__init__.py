"""How newcomers come into a job that runs: where members listen for them, and how both connect the larger job."""

from syncline.runtime.joining.growth import Entry, Growth, LargerFabric

__all__ = ["Entry", "Growth", "LargerFabric"]
