"""Reward kinds `instructions`, `format` and `repetition`."""

from __future__ import annotations

from typing import Any

from mrl.rewards.contract import RewardKind, RewardRequest, Stage, Verifier
from mrl.rewards.instructions.instruction_rules import FormatRules, InstructionRules, RepetitionRules


class Instructions(RewardKind):
    """Reward kind that checks the instructions named in the row."""

    rules_section = InstructionRules
    needs_ground_truth = True
    stages = (Stage(batch_size=32),)

    @property
    def is_binary(self) -> bool:
        return not self.rules.partial

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.instructions.instruction_verifier import InstructionVerifier

        return InstructionVerifier(self.rules)

    def parse_ground_truth(self, raw: Any, *, place: str) -> Any:
        from mrl.rewards.instructions.instruction_verifier import parse_checks

        return parse_checks(raw, place=place)

    def reading(self, request: RewardRequest) -> dict[str, str]:
        from mrl.rewards.instructions.plain_text import VisibleResponse

        return {"prose": VisibleResponse(request.visible).prose}


class Format(RewardKind):
    """Reward kind that checks a response's format."""

    rules_section = FormatRules
    stages = (Stage(batch_size=32),)

    @property
    def is_binary(self) -> bool:
        return True

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.instructions.format import format_verifier

        return format_verifier(self.rules)


class Repetition(RewardKind):
    """Reward kind that penalises repeated text."""

    rules_section = RepetitionRules
    stages = (Stage(batch_size=32),)

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.instructions.format import repetition_verifier

        return repetition_verifier(self.rules)
