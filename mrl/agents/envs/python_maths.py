"""Questions with a number as the answer, and tools to find it: GSM8K's rows, or others of its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.agents.envs.tool_task import ToolTask
from mrl.agents.tools.sources import SANDBOXED, make_tools
from mrl.agents.tools.tool import ToolBox
from mrl.errors import RewardError
from mrl.rewards.code.sandbox import find_sandbox
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.maths_verifier import verify_exactly
from mrl.rewards.visible import visible_text

_ANSWER_MARK = "####"
_TOOLS = ({"kind": "python"},)


class PythonMaths(ToolTask):
    """Row: {"question": ..., "answer": "... #### 18"}, or the number alone. Reward 1 for an equal answer."""

    def __init__(
        self, *, tools: Sequence[Mapping[str, Any]] = _TOOLS, max_calls: int = 8, max_chars: int = 4000
    ) -> None:
        """`tools`: as for `make_tools`. At most `max_calls` of a turn run, and results show `max_chars`."""
        super().__init__(ToolBox(make_tools(tools), max_calls=max_calls, max_chars=max_chars))
        self._rules = MathsRules(
            extraction=("boxed", "gsm8k", "answer", "whole_response", "last_number"), symbolic=False
        )

    @classmethod
    def prepare(cls, *, tools: Sequence[Mapping[str, Any]] = _TOOLS, **options: Any) -> None:
        """Find the sandbox once for all episodes, if a tool needs it. RewardError says what it lacks."""
        if any(tool.get("kind") in SANDBOXED for tool in tools):
            find_sandbox()

    def score(self, text: str) -> float:
        """Return 1 or 0. Raise RewardError (infrastructure failure) if the row's answer is not a number."""
        wanted = str(self.task["answer"]).rpartition(_ANSWER_MARK)[2].strip().replace(",", "")
        verdict = verify_exactly(visible_text(text), wanted, self._rules)
        if verdict is None or verdict.value is None:
            raise RewardError(f"python_maths: the row's answer {wanted[:80]!r} is not a number")
        return verdict.value
