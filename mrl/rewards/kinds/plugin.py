"""Reward kind `plugin`: a user's reward function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.rewards.contract import GroupVerifier, RewardKind, Stage, Verifier
from mrl.rewards.reward_part import RewardPart


class Plugin(RewardKind):
    """Reward kind that calls a user's reward function."""

    scores_groups = True

    @classmethod
    def faults(cls, part: RewardPart) -> Iterator[str]:
        yield from super().faults(part)
        if ":" not in (part.path or ""):
            yield f"path = {part.path!r} is not a plug-in; write package.module:function or file.py:function"

    def right_response(self, ground_truth: Any) -> str | None:
        return str(ground_truth) if isinstance(ground_truth, str | int | float) else None

    def verifier(self, stage: Stage) -> Verifier | GroupVerifier:
        from mrl.rewards.plugins.plugin_verifier import load_plugin

        return load_plugin(self.part)
