"""Put the stand-in for Transformer Engine on the path of a test's processes."""

from pathlib import Path

FOLDER = Path(__file__).parent / "transformer_engine_on_cpu"
"""Holds the package `transformer_engine`; spawned processes inherit sys.path."""
