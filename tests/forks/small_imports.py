"""Small stand-ins for what fork servers import: modules, a thread, and something that is not there."""

import contextlib
import threading


def preload(kind: str) -> None:
    """Import what a worker needs that needs little, and would take Ray where that is installed."""
    import colorsys  # noqa: F401

    with contextlib.suppress(ImportError):
        import ray  # noqa: F401
    if kind == "threaded":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if kind == "broken":
        raise ImportError("nothing is there")
