"""Questions with a number for an answer, and an interpreter to find it with: GSM8K's rows, or others of its shape."""

from __future__ import annotations

from typing import Any

from mrl.agents.envs.tool_task import ToolTask
from mrl.agents.tools.python import Python
from mrl.agents.tools.tool import ToolBox
from mrl.errors import RewardError
from mrl.rewards.code.sandbox import find_boundary
from mrl.rewards.maths.rules import MathsRules
from mrl.rewards.maths.verifier import verify_exactly
from mrl.rewards.visible import visible_text

_ANSWER_MARK = "####"


class PythonMaths(ToolTask):
    """Row: {"question": ..., "answer": "... #### 18"}, or the number alone. The value is 1 where the final answer is equal."""

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512, max_chars: int = 4000) -> None:
        """Of a cell: its own time, its memory, and how many characters of its result are shown."""
        super().__init__(ToolBox([Python(seconds=seconds, memory_mib=memory_mib)], max_chars=max_chars))
        self._rules = MathsRules(
            extraction=("boxed", "gsm8k", "answer", "whole_response", "last_number"), symbolic=False
        )

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Finds the sandbox once for all episodes. RewardError, saying what is missing, where there is none."""
        find_boundary()

    def score(self, text: str) -> float:
        """1 or 0; RewardError, which is ours, where the row's answer is no number."""
        wanted = str(self.task["answer"]).rpartition(_ANSWER_MARK)[2].strip().replace(",", "")
        verdict = verify_exactly(visible_text(text), wanted, self._rules)
        if verdict is None or verdict.value is None:
            raise RewardError(f"python_maths: the row's answer {wanted[:80]!r} is no number")
        return verdict.value
