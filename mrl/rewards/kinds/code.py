"""Programs, run here or by a service."""

from __future__ import annotations

import logging
from typing import Any

from mrl.rewards.addresses import check_address
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.contract import RewardKind, RewardRequest, Stage, Verifier
from mrl.rewards.reward_part import RewardPart

_log = logging.getLogger(__name__)


class _Programs(RewardKind):
    """Programs, whoever runs them."""

    needs_ground_truth = True
    stages = (Stage(keeps_deadline=True),)

    @property
    def is_binary(self) -> bool:
        return not self.rules.partial

    def parse_ground_truth(self, raw: Any, *, place: str) -> Any:
        from mrl.rewards.code.tasks import parse_task

        return parse_task(raw, place=place, rules=self.rules)

    def reading(self, request: RewardRequest) -> dict[str, str]:
        from mrl.rewards.code.program import reading_of

        return reading_of(request.visible, request.ground_truth)


class Code(_Programs):
    """Programs that run in the sandbox."""

    rules_section = CodeRules

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.code.code_verifier import CodeVerifier

        return CodeVerifier(self.rules)

    def announce(self) -> None:
        from mrl.rewards.code.sandbox import find_boundary

        boundary = find_boundary()
        level = logging.INFO if boundary.has_cgroup else logging.WARNING
        _log.log(level, "code verifier: %s", boundary.describe())


class CodeService(_Programs):
    """Programs that a remote service runs; the limits are those of `code`."""

    rules_name = "code"
    needs_path = True

    @classmethod
    def check(cls, part: RewardPart) -> None:
        super().check(part)
        check_address(part.path or "", "a code service", "a code service is asked without a key")

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.code.code_service import CodeServiceVerifier

        return CodeServiceVerifier(self.part.path or "", self.rules)
