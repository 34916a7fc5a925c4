"""A small stand-in for what fork servers import."""

import contextlib


def preload(kind: str) -> None:
    """Import what a worker needs that needs little, and would take Ray where that is installed."""
    import colorsys  # noqa: F401

    with contextlib.suppress(ImportError):
        import ray  # noqa: F401
