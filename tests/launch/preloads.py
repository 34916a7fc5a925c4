"""Small stand-ins for what fork servers import: a module, and beside it a thread."""

import contextlib
import threading

from mrl.config.root import Config


def variables(config: Config) -> dict[str, str]:
    """Some that the configuration decides."""
    return {"THREADS": str(config.rollout.num_threads)}


def preload(config: Config) -> None:
    """The imports of a worker that needs little, and would take Ray where that is installed."""
    import colorsys  # noqa: F401

    with contextlib.suppress(ImportError):
        import ray  # noqa: F401


def forever() -> None:
    """A thread that outlives all."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
