"""Semantic versions and ranges of them."""

from versions.ranges import Range, newest
from versions.version import Version

__all__ = ["Range", "Version", "newest"]
