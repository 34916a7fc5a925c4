"""The reward workers of a run: tried before anything starts, then beside the coroutines that ask them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mrl.config.root import Config
from mrl.errors import ConfigError, RewardError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool, try_verifiers
from mrl.samples import Prompt

JUDGED_FOLDER = "judged"
"""In the run folder: what models that judge have answered."""


def check_rewards(section: RewardSection, prompts: Sequence[Prompt]) -> None:
    """One trial sample through the verifier of each domain; ConfigError with what the verifier said."""
    try:
        try_verifiers(section, prompts)
    except RewardError as error:
        raise ConfigError(f"reward: {error}") from error


def reward_pool(
    config: Config, section: RewardSection, *, place: str = "", check: Callable[[], None] = lambda: None
) -> RewardPool:
    """Return the workers of a section. `place`: the folder, inside JUDGED_FOLDER, in which they keep what judges answer; `check`:
    raises what makes waiting for a verdict vain."""
    folder = str(Path(config.run_folder) / JUDGED_FOLDER / place)
    return RewardPool(section, group_size=config.loop.samples_per_prompt, folder=folder, check=check)
