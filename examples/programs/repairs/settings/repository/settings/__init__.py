"""Settings from layers: defaults, files, environment variables and words of a command line."""

from settings.interpolate import InterpolationError
from settings.layers import Settings

__all__ = ["InterpolationError", "Settings"]
