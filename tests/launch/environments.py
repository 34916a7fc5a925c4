"""Environments for runs of tests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.agents.environment import Step
from mrl.agents.tool_calls import ToolCall
from mrl.rewards.contract import RewardRequest, scored
from mrl.samples import Verdict


def letters(request: RewardRequest) -> Verdict:
    """Return the share of lower-case letters in a response, which Counting pays as its reward."""
    return scored(sum(letter.islower() for letter in request.response) / max(1, len(request.response)))


class Counting:
    """Answers with the turn's number and hard-to-tokenize letters; rewards lower-case letters."""

    def __init__(self, seconds: float = 0.0, hosts: str | None = None) -> None:
        """`seconds`: duration of a turn; `hosts`: folder to which each environment worker adds a file."""
        self._seconds, self._hosts = seconds, hosts

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self._left, self._said = int(task["turns"]), 0
        if self._hosts is not None:
            (Path(self._hosts) / str(os.getppid())).touch()
        return ""

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        time.sleep(self._seconds)
        self._left -= 1
        self._said += 1
        reward = sum(letter.islower() for letter in text) / max(1, len(text))
        return Step(f"{self._said} é語👩 <|im_end|> {len(text)}", reward=reward, done=not self._left)

    def close(self) -> None:
        pass
