"""Reward kind `code`: programs that run in the sandbox."""

from __future__ import annotations

import logging
from typing import Any

from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.contract import RewardKind, RewardRequest, Stage, Verifier

_log = logging.getLogger(__name__)


class Code(RewardKind):
    """Reward kind for programs that run in the sandbox."""

    needs_ground_truth = True
    rules_section = CodeRules
    stages = (Stage(keeps_deadline=True),)

    @property
    def is_binary(self) -> bool:
        return not self.rules.partial

    def parse_ground_truth(self, raw: Any, *, place: str) -> Any:
        from mrl.rewards.code.tasks import parse_task

        return parse_task(raw, place=place, rules=self.rules)

    def reading(self, request: RewardRequest) -> dict[str, str]:
        from mrl.rewards.code.program import describe_program

        return describe_program(request.visible, request.ground_truth)

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.code.code_verifier import CodeVerifier

        return CodeVerifier(self.rules)

    def announce(self) -> None:
        from mrl.rewards.code.sandbox import find_sandbox

        boundary = find_sandbox()
        level = logging.INFO if boundary.has_cgroup else logging.WARNING
        _log.log(level, "code verifier: %s", boundary.describe())
