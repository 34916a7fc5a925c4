"""URL paths to handlers, with typed parts."""

from router.router import NotFound, Router
from router.rules import Rule

__all__ = ["NotFound", "Router", "Rule"]
