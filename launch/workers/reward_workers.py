"""Reward workers of a run: tried before anything starts, then used by the rollout coroutines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mrl.config.root import Config
from mrl.errors import ConfigError, RewardError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool, try_verifiers
from mrl.samples import Prompt

JUDGED_FOLDER = "judged"
"""Folder in the run folder with the judges' responses."""


def check_rewards(section: RewardSection, prompts: Sequence[Prompt]) -> None:
    """Try each domain's verifier on one sample. Raises ConfigError with the verifier's message."""
    try:
        try_verifiers(section, prompts)
    except RewardError as error:
        raise ConfigError(f"reward: {error}") from error


def reward_pool(
    config: Config, section: RewardSection, *, place: str = "", check: Callable[[], None] = lambda: None
) -> RewardPool:
    """Return the workers of a section. `place`: their folder in JUDGED_FOLDER; `check`: raises if waiting for
    a verdict is pointless."""
    folder = str(Path(config.run_folder) / JUDGED_FOLDER / place)
    return RewardPool(section, group_size=config.loop.samples_per_prompt, folder=folder, check=check)
