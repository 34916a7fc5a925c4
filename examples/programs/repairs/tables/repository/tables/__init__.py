"""Small tables: rows with named columns, joined, grouped and sorted."""

from tables.joins import join
from tables.table import Table

__all__ = ["Table", "join"]
