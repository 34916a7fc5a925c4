"""A program with a mistake in a file: read it, edit it, run its tests.

The file is text in this process; only the tests run it, each time in a fresh sandbox, by the verifier of programs. So the value is
a verdict over the text, and nothing that the policy's code writes while it runs is ever read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mrl.agents.environment import SandboxLost
from mrl.agents.envs.tool_task import ToolTask
from mrl.agents.tools.tool import ToolBox, ToolError, arguments_schema
from mrl.errors import RewardError
from mrl.rewards.code.rules import CodeRules
from mrl.rewards.code.sandbox import find_boundary
from mrl.rewards.code.tasks import CodeTask, parse_task
from mrl.rewards.code.verifier import verify_program

_MAX_CHARS = 100_000


class _Files:
    """The files of an episode, by their paths."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def text(self, path: str) -> str:
        """ToolError, with those that are there, for a path that is not."""
        if path not in self.texts:
            raise ToolError(f"no file {path[:100]!r}; there are {', '.join(sorted(self.texts))}")
        return self.texts[path]


class ReadFile:
    """Shows a file."""

    name = "read_file"
    description = "Shows a file's text."
    parameters = arguments_schema(path={"type": "string"})

    def __init__(self, files: _Files) -> None:
        self._files = files

    def run(self, path: str) -> str:
        """Its text."""
        return self._files.text(path)

    def close(self) -> None:
        """Nothing to end."""


class EditFile:
    """Replaces a text that stands in a file once."""

    name = "edit_file"
    description = "Replaces `old`, which must stand in the file exactly once, by `new`."
    parameters = arguments_schema(path={"type": "string"}, old={"type": "string"}, new={"type": "string"})

    def __init__(self, files: _Files) -> None:
        self._files = files

    def run(self, path: str, old: str, new: str) -> str:
        """ToolError where `old` does not stand there once, or the file grows too large."""
        text = self._files.text(path)
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolError(f"the text to replace stands in {path} {count} times, not once")
        if len(text) + len(new) > _MAX_CHARS:
            raise ToolError(f"a file has at most {_MAX_CHARS} characters")
        self._files.texts[path] = text.replace(old, new)
        return "edited"

    def close(self) -> None:
        """Nothing to end."""


class RunTests:
    """Runs the tests that the row shows."""

    name = "run_tests"
    description = "Runs the tests on the file as it is now."
    parameters = arguments_schema()

    def __init__(self, files: _Files, rules: CodeRules) -> None:
        self._files, self._rules = files, rules
        self.path, self.task = "", CodeTask(entry_point=None)

    def run(self) -> str:
        """How the tests went."""
        value, reason = self.verdict(self.task)
        return "all tests pass" if value == 1.0 else f"failed: {reason}"

    def verdict(self, task: CodeTask) -> tuple[float, str]:
        """The value of the file for a task, and why. SandboxLost where it could not be looked at."""
        try:
            verdict = verify_program(self._files.texts[self.path], task, self._rules)
        except RewardError as error:
            raise SandboxLost(str(error)) from error
        return float(verdict.value or 0.0), verdict.reason

    def close(self) -> None:
        """Nothing to end."""


class FileRepair(ToolTask):
    """Row: {"prompt": ..., "path", "program", "tests": a code task that may be run, "hidden": one that decides}. Tasks are those
    of the verifier of programs: {"entry_point", "cases": [{"args", "expected"}]} or asserts. The value is 1 where all that is
    hidden passes."""

    def __init__(self, *, seconds: float = 5.0, memory_mib: int = 512) -> None:
        """Of one run of the tests."""
        self._files = _Files()
        rules = CodeRules(seconds=seconds, cpu_seconds=seconds, memory_mib=memory_mib)
        self._tests = RunTests(self._files, rules)
        super().__init__(ToolBox([ReadFile(self._files), EditFile(self._files), self._tests]))

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Finds the sandbox once for all episodes. RewardError, saying what is missing, where there is none."""
        find_boundary()

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """The row's own prompt stands."""
        self._files.texts[task["path"]] = task["program"]
        self._tests.path = task["path"]
        self._tests.task = parse_task(task["tests"], place="file_repair: tests")
        self._hidden = parse_task(task.get("hidden") or task["tests"], place="file_repair: hidden")
        return super().reset(task, seed)

    def score(self, text: str) -> float:
        """Of the file, whatever the last turn says."""
        return self._tests.verdict(self._hidden)[0]


def repair_rows(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Made data: short functions with one operator that is wrong; a pure function of the arguments."""
    rng = random.Random(seed)
    for _ in range(count):
        (name, right, wrong, fold) = rng.choice(_FUNCTIONS)
        program = f"def {name}(numbers):\n    result = numbers[0]\n    for number in numbers[1:]:\n        result = {wrong}\n    return result\n"
        cases = [[rng.randrange(1, 100) for _ in range(rng.randrange(2, 6))] for _ in range(6)]
        told = [{"args": [case], "expected": fold(case)} for case in cases]
        asked = f"{name}(numbers) in {name}.py is to fold a list with `result = {right}`, as its name says, and has a mistake. Repair it."
        yield {
            "prompt": [{"role": "user", "content": asked}],
            "path": f"{name}.py",
            "program": program,
            "tests": {"entry_point": name, "cases": told[:2]},
            "hidden": {"entry_point": name, "cases": told},
        }


def _difference(numbers: list[int]) -> int:
    return numbers[0] - sum(numbers[1:])


_FUNCTIONS = (
    ("total", "result + number", "result - number", sum),
    ("difference", "result - number", "result + number", _difference),
    ("largest", "max(result, number)", "min(result, number)", max),
    ("smallest", "min(result, number)", "max(result, number)", min),
)
