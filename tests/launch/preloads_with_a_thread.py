"""What a fork server must not import: it starts a thread."""

from mrl.config.root import Config
from tests.launch import preloads


def preload(config: Config) -> None:
    """Leaves a thread running."""
    preloads.forever()
