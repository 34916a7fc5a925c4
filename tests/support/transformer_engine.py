"""Puts the stand-in for Transformer Engine on the path of the processes that a test starts."""

from pathlib import Path

FOLDER = Path(__file__).parent / "transformer_engine_on_cpu"
"""Holds the package `transformer_engine`; spawned processes inherit sys.path."""
