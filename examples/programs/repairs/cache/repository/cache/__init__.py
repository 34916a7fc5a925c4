"""A cache of limited size whose entries expire."""

from cache.decorator import cached
from cache.store import Cache, Statistics

__all__ = ["Cache", "Statistics", "cached"]
