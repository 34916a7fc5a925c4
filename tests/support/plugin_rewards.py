"""Rewards by the functions of tests/mrl/rewards/plugins_for_tests.py."""

from pathlib import Path
from typing import Any

from mrl.rewards.kinds.reward_section import RewardSection

PLUGINS = str(Path(__file__).parents[1] / "mrl/rewards/plugins_for_tests.py")


def plugin(name: str, **fields: Any) -> RewardSection:
    return RewardSection(kind="plugin", path=f"{PLUGINS}:{name}", **{"workers": 1, **fields})
