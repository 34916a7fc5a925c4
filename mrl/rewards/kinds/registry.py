"""Every kind of reward by its name in the settings."""

from __future__ import annotations

from mrl.config.sections.reward import RewardPart
from mrl.rewards.code.remote import CodeService
from mrl.rewards.code.verifier import Code
from mrl.rewards.contract import RewardKind
from mrl.rewards.instructions.format import Format, Repetition
from mrl.rewards.instructions.verifier import Instructions
from mrl.rewards.maths.verifier import Maths
from mrl.rewards.plugins.plugin import Plugin

KINDS: dict[str, type[RewardKind]] = {
    "maths": Maths,
    "code": Code,
    "code_service": CodeService,
    "instructions": Instructions,
    "format": Format,
    "repetition": Repetition,
    "plugin": Plugin,
}


def kind_of(part: RewardPart) -> RewardKind:
    """The kind that a part of the settings names."""
    return KINDS[str(part.kind)](part)
