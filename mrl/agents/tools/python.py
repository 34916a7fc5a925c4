"""Python in the sandbox that programs of responses run in, with names that stay from one call to the next."""

from __future__ import annotations

from mrl.agents.environment import SandboxLost
from mrl.agents.tools.tool import ToolError, arguments_schema
from mrl.errors import RewardError
from mrl.rewards.code.cells import Cells
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.outcome import CandidateEnded
from mrl.rewards.code.sandbox import find_boundary


class Interpreter:
    """One sandboxed interpreter at a time: it starts with the first cell, and anew after one that ended it."""

    def __init__(self, *, seconds: float, memory_mib: int) -> None:
        """`seconds` of a cell's own time, and of its processes' processor time."""
        self._rules = CodeRules(seconds=seconds, cpu_seconds=seconds, memory_mib=memory_mib)
        self._cells: Cells | None = None

    def run(self, source: str) -> str:
        """What a cell printed, and what it raised. ToolError where it used up its time or memory, or ended the interpreter;
        SandboxLost where there is none to be had."""
        try:
            if self._cells is None:
                self._cells = Cells(find_boundary(), self._rules).__enter__()
            result = self._cells.run(source)
        except CandidateEnded as ended:
            self.close()
            raise ToolError(f"{ended}; the interpreter starts anew, without its names and files") from ended
        except RewardError as error:
            self.close()
            raise SandboxLost(str(error)) from error
        return "".join([result.output, result.error]) or "(no output)"

    def close(self) -> None:
        """Ends the interpreter; nothing where there is none."""
        cells, self._cells = self._cells, None
        if cells is not None:
            cells.__exit__()


class Python:
    """Cells of Python."""

    name = "python"
    description = "Runs Python and shows what it prints, and the value of its last expression. Names stay between calls."
    parameters = arguments_schema(code={"type": "string"})

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512) -> None:
        """Of one cell."""
        self._interpreter = Interpreter(seconds=seconds, memory_mib=memory_mib)

    def run(self, code: str) -> str:
        """As `Interpreter.run`."""
        return self._interpreter.run(code)

    def close(self) -> None:
        """Ends the interpreter."""
        self._interpreter.close()


_SHELL = """
import subprocess
_done = subprocess.run(["/bin/sh", "-c", {command!r}], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
print(_done.stdout, end="")
print(_done.stderr, end="")
if _done.returncode:
    print("exit status", _done.returncode)
"""


class Shell:
    """Commands of a shell in a sandbox without a network; files in /tmp stay between calls."""

    name = "shell"
    description = "Runs a command in a shell without a network. Files in /tmp stay between calls."
    parameters = arguments_schema(command={"type": "string"})

    def __init__(self, *, seconds: float = 10.0, memory_mib: int = 512) -> None:
        """Of one command."""
        self._interpreter = Interpreter(seconds=seconds, memory_mib=memory_mib)

    def run(self, command: str) -> str:
        """What the command printed. SandboxLost where this machine's sandbox lets no process be started, else as
        `Interpreter.run`."""
        if not _boundary_has_processes():
            raise SandboxLost(
                "the shell tool needs a sandbox with a cgroup: without one it starts no process"
            )
        return self._interpreter.run(_SHELL.format(command=command))

    def close(self) -> None:
        """Ends the sandbox."""
        self._interpreter.close()


def _boundary_has_processes() -> bool:
    try:
        return find_boundary().has_cgroup
    except RewardError as error:
        raise SandboxLost(str(error)) from error
