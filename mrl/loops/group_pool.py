"""The store of a run's judged groups: whether its folder takes what they may come to, and how it is opened."""

from __future__ import annotations

import logging
from pathlib import Path

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.errors import ConfigError
from mrl.pool.file_store import FileStore
from mrl.pool.folder import clear, fault
from mrl.pool.room import admission_of, most_bytes

log = logging.getLogger(__name__)


def check_pool(config: Config) -> None:
    """The folder of the store is this run's, can be written to and has room. ConfigError with what to do; nothing is left
    behind."""
    if config.loop.schedule != "stream":
        return
    spilled = max(0, most_bytes(config) - config.stream.pool.memory_bytes)
    if found := fault(_folder(config), _owner(config), num_bytes=spilled):
        raise ConfigError(
            f"stream.pool.folder, {_folder(config)}: {found}; name another folder on this machine, empty or new. "
            f"{admission_of(config).slots} groups of longest responses, as many as may wait, take {spilled / 2**30:.1f} GiB beyond "
            "stream.pool.memory_bytes; a smaller stream.max_age is fewer"
        )


def open_group_store(config: Config, prompts: PromptStream) -> FileStore:
    """The store without a group; what an earlier attempt left is dropped. PoolError where the folder cannot be used."""
    folder, owner = _folder(config), _owner(config)
    if dropped := clear(folder, owner):
        log.warning(
            "%s: %d bytes of groups of an earlier attempt dropped; what its checkpoint needs is in there",
            folder, dropped,
        )  # fmt: skip
    memory = config.stream.pool.memory_bytes
    return FileStore(folder, run=owner, memory_bytes=memory, prompt_at=prompts.prompt_at)


def _folder(config: Config) -> Path:
    return Path(config.stream.pool.folder or f"{config.run_folder}/pool")


def _owner(config: Config) -> str:
    """What the folder is marked with: inside the run's folder, which may be moved, the run's name."""
    return str(Path(config.run_folder).resolve()) if config.stream.pool.folder else config.run.name
