"""A small stand-in for the imports of fork servers."""

import contextlib


def preload(kind: str) -> None:
    """Import a small module, and Ray unless the server blocks it."""
    import colorsys  # noqa: F401

    with contextlib.suppress(ImportError):
        import ray  # noqa: F401
