"""Verify instructions: a row names the checks that its response must pass.

[{"check": "num_words", "relation": "at_most", "count": 50}, {"check": "no_commas"}]

The forms of IFEval and RLVR-IFeval are accepted too (see `ifeval`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.errors import DataError
from mrl.rewards.contract import RewardRequest, rejected, scored
from mrl.rewards.instructions.checks import CHECKS, arguments_error
from mrl.rewards.instructions.ifeval import convert_checks
from mrl.rewards.instructions.instruction_rules import InstructionRules
from mrl.rewards.instructions.plain_text import VisibleResponse, plain_text
from mrl.rewards.visible import visible_text
from mrl.samples import Verdict

MAX_CHARS = 500_000


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Check with its arguments."""

    name: str
    arguments: Mapping[str, Any]
    """Argument -> value; texts are converted by `plain_text`, like the response."""


def parse_checks(raw: Any, *, place: str) -> tuple[Check, ...]:
    """Parse a row's checks. Raises DataError naming the place and the first fault."""
    if isinstance(raw, str) and raw[:1] in ("[", "{"):
        raw = _parsed(raw, place)
    if isinstance(raw, dict):
        raw = convert_checks(raw, place=place) or [raw]
    if not isinstance(raw, list) or not raw:
        raise DataError(
            f"{place}: the answer of an instruction row must be a list of checks, not {str(raw)[:80]!r}"
        )
    checks = []
    for entry in raw:
        if not isinstance(entry, dict) or not isinstance(entry.get("check"), str):
            raise DataError(
                f"{place}: a check must be an object with 'check' and its arguments, not {str(entry)[:80]!r}"
            )
        arguments = {
            name: _plain(value) for name, value in entry.items() if name != "check" and value is not None
        }
        fault = arguments_error(entry["check"], arguments)
        if fault:
            raise DataError(f"{place}: {fault}")
        checks.append(Check(entry["check"], arguments))
    return tuple(checks)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return plain_text(value) if isinstance(value, str) else value


def _parsed(raw: str, place: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise DataError(f"{place}: the checks are not valid JSON: {error}") from error


def verify_instructions(
    response: str,
    checks: Sequence[Check],
    rules: InstructionRules = InstructionRules(),  # noqa: B008
) -> Verdict:
    """Run all checks on a response's visible text; without visible text, every check fails."""
    if len(response) > MAX_CHARS:
        return rejected(f"response longer than {MAX_CHARS} characters")
    reading = VisibleResponse(visible_text(response))
    passed = [bool(reading.prose) and CHECKS[check.name](reading, **check.arguments) for check in checks]
    share = sum(passed) / len(passed)
    failed = [check.name for check, ok in zip(checks, passed, strict=True) if not ok]
    value = share if rules.partial else float(not failed)
    parts = {
        f"{number}.{check.name}": float(ok)
        for number, (check, ok) in enumerate(zip(checks, passed, strict=True))
    }
    return dataclasses.replace(
        scored(value, f"failed: {', '.join(failed)}" if failed else "all passed"), parts=parts
    )


class InstructionVerifier:
    """Verifier that uses `verify_instructions`."""

    name, version = "instructions", "3"

    def __init__(self, rules: InstructionRules) -> None:
        self._rules = rules

    async def score(self, request: RewardRequest) -> Verdict:
        return verify_instructions(request.visible, request.ground_truth, self._rules)
