"""Map from the name of a reward kind in the settings to its class."""

from __future__ import annotations

from mrl.rewards.contract import RewardKind
from mrl.rewards.kinds.code import Code
from mrl.rewards.kinds.environment_return import EnvironmentReturn
from mrl.rewards.kinds.instructions import Format, Instructions, Repetition
from mrl.rewards.kinds.maths import Maths
from mrl.rewards.kinds.model_judges import Llm, RewardModel
from mrl.rewards.kinds.plugin import Plugin
from mrl.rewards.reward_part import RewardPart

KINDS: dict[str, type[RewardKind]] = {
    "maths": Maths,
    "code": Code,
    "instructions": Instructions,
    "format": Format,
    "repetition": Repetition,
    "plugin": Plugin,
    "environment": EnvironmentReturn,
    "llm": Llm,
    "reward_model": RewardModel,
}


def reward_kind(part: RewardPart, folder: str | None = None) -> RewardKind:
    """Build the kind that `part` names; `folder` is the run's folder for rewards, None without a run."""
    return KINDS[str(part.kind)](part, folder)
