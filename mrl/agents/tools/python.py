"""Python in the sandbox that runs responses' programs, with names that persist between calls."""

from __future__ import annotations

from mrl.agents.environment import SandboxLost
from mrl.agents.tools.tool import ToolError, arguments_schema
from mrl.errors import RewardError
from mrl.rewards.code.cells import Cells
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.outcome import CandidateEnded
from mrl.rewards.code.sandbox import find_sandbox


class Interpreter:
    """One sandboxed interpreter at a time: the first cell starts it, and the next cell if one ended it."""

    def __init__(self, *, seconds: float, memory_mib: int) -> None:
        """`seconds`: limit of a cell's own time, and of its processes' CPU time."""
        self._rules = CodeRules(seconds=seconds, cpu_seconds=seconds, memory_mib=memory_mib)
        self._cells: Cells | None = None

    def run(self, source: str) -> str:
        """Return what a cell printed and raised. Raise ToolError if it exceeded time or memory or ended the
        interpreter, SandboxLost if there is no sandbox."""
        try:
            if self._cells is None:
                self._cells = Cells(find_sandbox(), self._rules).__enter__()
            result = self._cells.run(source)
        except CandidateEnded as ended:
            self.close()
            raise ToolError(f"{ended}; the interpreter starts anew, without its names and files") from ended
        except RewardError as error:
            self.close()
            raise SandboxLost(str(error)) from error
        return "".join([result.output, result.error]) or "(no output)"

    def close(self) -> None:
        """End the interpreter, if there is one."""
        cells, self._cells = self._cells, None
        if cells is not None:
            cells.__exit__()


class Python:
    """Tool that runs Python cells."""

    name = "python"
    description = (
        "Runs Python and shows what it prints, and the value of its last expression. "
        "Names stay between calls."
    )
    parameters = arguments_schema(code={"type": "string"})

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512) -> None:
        """`seconds`, `memory_mib`: limits of one cell."""
        self._interpreter = Interpreter(seconds=seconds, memory_mib=memory_mib)

    def run(self, code: str) -> str:
        """Run a cell as `Interpreter.run` does."""
        return self._interpreter.run(code)

    def close(self) -> None:
        """End the interpreter."""
        self._interpreter.close()


_SHELL = """
import subprocess
_done = subprocess.run(
    ["/bin/sh", "-c", {command!r}], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
)
print(_done.stdout, end="")
print(_done.stderr, end="")
if _done.returncode:
    print("exit status", _done.returncode)
"""


class Shell:
    """Tool that runs shell commands in a sandbox without a network; files in /tmp persist between calls."""

    name = "shell"
    description = "Runs a command in a shell without a network. Files in /tmp stay between calls."
    parameters = arguments_schema(command={"type": "string"})

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512) -> None:
        """`seconds`, `memory_mib`: limits of one command."""
        self._interpreter = Interpreter(seconds=seconds, memory_mib=memory_mib)

    def run(self, command: str) -> str:
        """Return what the command printed. Raise SandboxLost if the machine's sandbox cannot start processes;
        otherwise as `Interpreter.run`."""
        if not _boundary_has_processes():
            raise SandboxLost(
                "the shell tool needs a sandbox with a cgroup: without one it starts no process"
            )
        return self._interpreter.run(_SHELL.format(command=command))

    def close(self) -> None:
        """End the sandbox."""
        self._interpreter.close()


def _boundary_has_processes() -> bool:
    try:
        return find_sandbox().has_cgroup
    except RewardError as error:
        raise SandboxLost(str(error)) from error
