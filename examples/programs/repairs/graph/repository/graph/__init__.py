"""Tasks that depend on each other: their order, and what can run at once."""

from graph.order import CycleError, levels, order
from graph.tasks import Graph

__all__ = ["CycleError", "Graph", "levels", "order"]
