"""A reward kind in one file that counts vowels; `main` registers it and prints verdicts."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from mrl.errors import ConfigError, DataError
from mrl.rewards.contract import RewardKind, RewardRequest, Stage, scored
from mrl.rewards.kinds.registry import KINDS
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Verdict
from mrl.section import Section


class VowelRules(Section):
    """How vowels count."""

    points: float = 1.0
    """Value of a right answer."""


class Vowels(RewardKind):
    """Counts vowels in two stages: the first, in batches, leaves long responses to the second."""

    rules_section = VowelRules
    needs_ground_truth = True
    stages = (Stage("short", batch_size=8), Stage("long", in_child=True, keeps_deadline=True))

    def verifier(self, stage: Stage) -> VowelVerifier:
        return VowelVerifier(self.rules, short=stage.name == "short")

    def parse_ground_truth(self, raw: Any, *, place: str) -> int:
        if not str(raw).isdigit():
            raise DataError(f"{place}: {raw!r} is no number of vowels")
        return int(raw)


class VowelVerifier:
    name, version = "vowels", "1"

    def __init__(self, rules: VowelRules, *, short: bool) -> None:
        self._rules, self._short = rules, short

    async def score(self, request: RewardRequest) -> Verdict | None:
        if self._short and len(request.response) > 8:
            return None
        right = sum(letter in "aeiou" for letter in request.response) == request.ground_truth
        return scored(self._rules.points * right, "short" if self._short else "long")


def main() -> None:
    """Read [settings, [[response, answer], ...]] lists as JSON; print verdicts and help, or the error."""
    KINDS["vowels"] = Vowels
    print(json.dumps([_made_of(*case) for case in json.load(sys.stdin)]))


def _made_of(overrides: list[str], rows: list[list[Any]]) -> Any:
    from mrl.config.describe import settings
    from mrl.config.load import load
    from mrl.rewards.kinds.ground_truth import parse_ground_truth
    from mrl.rewards.pool.reward_pool import RewardPool

    try:
        section = load(["configs/quickstart.yaml"], overrides).reward
        truths = [parse_ground_truth(row[1], domain="x", section=section, place="f:1") for row in rows]
    except (ConfigError, DataError) as error:
        return str(error)
    verdicts: dict[str, Verdict] = {}
    with RewardPool(section) as pool:
        for index, ((response, _), truth) in enumerate(zip(rows, truths, strict=True)):
            prompt = Prompt(index, np.zeros(1, np.int32), "question", ground_truth=truth)
            pool.submit(trial_sample(prompt, response), prompt)
        while len(verdicts) < len(rows):
            verdicts |= pool.collect(60.0)
    sentences = {setting.path: setting.sentence for setting in settings()}
    seen = [[verdicts[f"{n}.0"].value, verdicts[f"{n}.0"].reason] for n in range(len(rows))]
    return [seen, sentences["reward.vowels.points"]]
