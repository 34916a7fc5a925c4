"""Reward kind `maths`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.rewards.contract import RewardKind, RewardRequest, Stage, Verifier
from mrl.rewards.maths.maths_rules import MathsRules

_FORMS = {
    "boxed": "\\boxed{{{}}}",
    "gsm8k": "#### {}",
    "answer": "Answer: {}",
    "answer_tags": "<answer>{}</answer>",
}
"""Extraction place -> format of a final answer there; elsewhere the answer is the whole response."""


class Maths(RewardKind):
    """Reward kind for mathematics: exact numbers in batches, then symbolic comparison in a killable child."""

    rules_section = MathsRules
    needs_ground_truth = True
    stages = (Stage("exact", batch_size=64), Stage("symbolic", in_child=True, keeps_deadline=True))

    @property
    def is_binary(self) -> bool:
        return True

    def used_stages(self) -> tuple[Stage, ...]:
        return self.stages if self.rules.symbolic else self.stages[:1]

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.maths.maths_verifier import MathsVerifier

        return MathsVerifier(self.rules, in_child=stage.in_child)

    def parse_ground_truth(self, raw: Any, *, place: str) -> str:
        from mrl.rewards.maths.maths_verifier import parse_maths_ground_truth

        return parse_maths_ground_truth(raw, rules=self.rules, place=place)

    def reading(self, request: RewardRequest) -> Mapping[str, str]:
        from mrl.rewards.maths.answers import final_answer

        answer = final_answer(request.visible, self.rules)
        return {
            "place": answer.place or f"none of {', '.join(self.rules.extraction)}",
            "read": answer.reason if answer.text is None else answer.text,
            "compared with": str(request.ground_truth),
        }

    def right_response(self, ground_truth: Any) -> str:
        return _FORMS.get(self.rules.extraction[0], "{}").format(ground_truth)

    def remark(self, ground_truth: Any) -> str:
        from mrl.rewards.maths.numbers import exact_quantity
        from mrl.rewards.maths.symbolic import read_ground_truth

        number = exact_quantity(ground_truth)
        shape = number or read_ground_truth(ground_truth)
        return "" if shape else "the maths verifier cannot parse the ground truth, so it compares its text"
