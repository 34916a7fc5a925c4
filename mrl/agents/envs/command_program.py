"""Programs that are commands: each runs in a sandbox, and a fresh one grades what it left.

| phase | in the sandbox | what a failure means |
|---|---|---|
| boot | `files` in /work, the row's `columns` in /tmp/task.json | infrastructure: the program starts again |
| program | `command`, with the model as the only address | the policy's: what it left is graded |
| boot | a fresh one: `grade.files`, `files`, and what the program left that `grade.keep` names | the same |
| grade | `grade.command`; /tmp/task.json has the whole row | reward 0 |

Nothing else that the program's processes wrote reaches the grade: neither /tmp, nor links, nor processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mrl.agents.environment import Model, SandboxLost, Step
from mrl.agents.sandboxes.providers import (
    TMP,
    Sandbox,
    SandboxLimits,
    SandboxProvider,
    TooLarge,
    find_provider,
    model_variables,
    open_sandbox,
)
from mrl.agents.sandboxes.work_files import WorkFile, matches, overlay, read_folder
from mrl.config.sections.programs import GradeSection, ProgramSection, SandboxSection
from mrl.errors import ConfigError

TASK_FILE, REWARD_FILE = "task.json", "reward"
"""Files in /tmp: the task, and the number that a grade may write."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")
_LOCK_SECONDS = 0.02
CHECK_SECONDS, _FILES_SECONDS = 120.0, 300.0
"""Parts of a sandbox's longest life: for the check at the start, and for the files of any."""


class CommandProgram:
    """Program of `agent.program` (`environment.Program`)."""

    about: ClassVar[str] = ""
    """Its sandbox, for the log."""
    _boots: ClassVar[BootSlots | None] = None

    def __init__(self, *, memory_mib: int, **options: Any) -> None:
        """`options`: fields of ProgramSection."""
        self._program = ProgramSection(**options)
        sandbox = self._program.sandbox
        self._provider = find_provider(sandbox.kind, sandbox.options)
        self._memory_mib = memory_mib

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Check the sandbox, the files and the commands once; raise ConfigError for what is missing. What
        this reads is there in every program's process."""
        program = cls(**options)
        cls._boots = BootSlots(program._program.sandbox.boots)
        cls.about = program.check()

    def check(self) -> str:
        """Open a sandbox and look for the commands in it; return its description. Raises ConfigError."""
        program = self._program
        for word in (*program.command, *program.env.values()):
            _filled(word, dict.fromkeys(program.columns, ""), "agent.program.command")
        try:
            with self._opened(None, CHECK_SECONDS) as sandbox:
                paths = [program.files, program.grade.files if program.grade is not None else None]
                fixed = [path for path in paths if path is not None and not _PLACEHOLDER.search(path)]
                sandbox.write(overlay(*map(_folder, fixed)))
                for command in (program.command, program.grade.command if program.grade is not None else []):
                    # Files of rows, and a command that a column names, are not known yet.
                    if command and not _PLACEHOLDER.search(command[0]) and "/" not in command[0]:
                        require_command(sandbox, command[0])
                return sandbox.describe()
        except (SandboxLost, TooLarge) as error:
            raise ConfigError(f"agent.program.sandbox: {error}") from error

    def run(self, task: dict[str, Any], seed: int, model: Model) -> Step:
        """Run the command and grade what it left."""
        program = self._program
        shown = {column: task[column] for column in program.columns if column in task}
        if missing := sorted(set(program.columns) - shown.keys()):
            raise ConfigError(f"agent.program.columns names {missing}, which the row does not have")
        texts = {column: _text(value) for column, value in shown.items()}
        files = _files_of(program.files, task)
        with self._opened(model, program.seconds) as sandbox:
            sandbox.write(files)
            sandbox.write({TASK_FILE: _json_file(shown)}, TMP)
            env = model_variables(sandbox) | {"MRL_TASK": f"{TMP}/{TASK_FILE}", "MRL_SEED": str(seed)}
            env |= {name: _filled(value, texts, "agent.program.env") for name, value in program.env.items()}
            command = [_filled(word, texts, "agent.program.command") for word in program.command]
            done = sandbox.run(command, seconds=program.seconds, env=env)
            reason = "" if done.status == 0 else f"the program: {done}"
            if program.grade is None:
                return Step(info={"reason": reason})
            try:
                kept = sandbox.read(program.grade.keep)
            except TooLarge as error:
                return Step(reward=0.0, info={"reason": f"{error}; {reason}"})
        reward, why = self._graded(program.grade, files, kept, task, seed)
        reason = "; ".join(filter(None, (reason, why and f"the grade: {why}")))
        return Step(reward=reward, info={"reason": reason})

    def _graded(
        self,
        grade: GradeSection,
        files: Mapping[str, WorkFile],
        kept: Mapping[str, WorkFile],
        task: Mapping[str, Any],
        seed: int,
    ) -> tuple[float, str]:
        """Return the reward, and why it is 0, if the files or the command's end are the reason."""
        unchanged = {
            path: file
            for path, file in files.items()
            if file.kind == "folder" or not matches(path, grade.keep)
        }
        given = overlay(_files_of(grade.files, task), unchanged)
        left = {path: file for path, file in overlay(given, kept).items() if path not in given}
        with self._opened(None, grade.seconds) as sandbox:
            sandbox.write(given)
            sandbox.write({TASK_FILE: _json_file(task)}, TMP)
            try:
                sandbox.write(left)
            except TooLarge as error:
                return 0.0, str(error)
            env = {"MRL_TASK": f"{TMP}/{TASK_FILE}", "MRL_SEED": str(seed)}
            done = sandbox.run(grade.command, seconds=grade.seconds, env=env)
            if done.status != 0 or done.timed_out:
                return 0.0, str(done)
            if grade.reward == "status":
                return 1.0, ""
            with contextlib.suppress(TooLarge, KeyError, ValueError):
                number = float(sandbox.read([REWARD_FILE], TMP)[REWARD_FILE].data)
                if math.isfinite(number):
                    return number, ""
            return 0.0, f"no finite number in {TMP}/{REWARD_FILE}"

    def _opened(self, model: Model | None, seconds: float) -> contextlib.AbstractContextManager[Sandbox]:
        settings = self._program.sandbox
        limits = command_limits(settings, seconds, memory_mib=self._memory_mib, cpus=settings.cpus)
        return booted(self._provider, settings, self._boots, image=settings.image, limits=limits, model=model)


class BootSlots:
    """A number of slots, shared by this process and those that it forks; each ends with its process."""

    def __init__(self, count: int) -> None:
        self._count, self._file = count, os.memfd_create("mrl-boots")

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a slot, and keep it meanwhile."""
        slot = self._take()
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def _take(self) -> int:
        while True:
            for slot in range(self._count):
                with contextlib.suppress(BlockingIOError, PermissionError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                    return slot
            time.sleep(_LOCK_SECONDS)


def command_limits(
    settings: SandboxSection, seconds: float, *, memory_mib: int, cpus: float
) -> SandboxLimits:
    """Return the limits of a sandbox for a command of so many seconds."""
    return SandboxLimits(
        memory_mib=memory_mib,
        disk_mib=settings.disk_mib,
        processes=settings.processes,
        cpus=cpus,
        boot_seconds=settings.boot_seconds,
        life_seconds=settings.boot_seconds + seconds + _FILES_SECONDS,
    )


@contextlib.contextmanager
def booted(
    provider: SandboxProvider,
    settings: SandboxSection,
    boots: BootSlots | None,
    *,
    image: str | None,
    limits: SandboxLimits,
    model: Model | None,
    folders: Sequence[str] = (),
) -> Iterator[Sandbox]:
    """Open a sandbox, as `SandboxProvider.open`; if `boots` are given, it takes one of them meanwhile."""
    with contextlib.ExitStack() as stack:
        with boots.taken() if boots is not None else contextlib.nullcontext():
            sandbox = stack.enter_context(
                open_sandbox(
                    provider, image=image, mounts=settings.mounts, limits=limits, model=model, folders=folders
                )
            )
        yield sandbox


def require_command(sandbox: Sandbox, name: str) -> None:
    """Raise ConfigError if the sandbox has no such command."""
    done = sandbox.run(["sh", "-c", 'command -v -- "$1"', "sh", name], seconds=60.0)
    if done.status != 0:
        raise ConfigError(
            f"the sandbox has no command {name!r}; add it to the image, or mount its folder "
            f"(sandbox.mounts) and name its whole path ({done})"
        )


@functools.cache
def _folder(path: str) -> dict[str, WorkFile]:
    return read_folder(Path(path))


def _files_of(path: str | None, task: Mapping[str, Any]) -> Mapping[str, WorkFile]:
    """Return the files of a path that may name the row's columns."""
    if path is None:
        return {}
    if not _PLACEHOLDER.search(path):
        return _folder(path)
    filled = Path(_filled(path, {column: _text(value) for column, value in task.items()}, "files"))
    if ".." in filled.parts and ".." not in Path(path).parts:
        raise ConfigError(f"the files {path!r} of a row are outside their folder: {str(filled)!r}")
    return read_folder(filled)


def _filled(text: str, columns: Mapping[str, str], setting: str) -> str:
    """Return a text with the columns in the places that name them. Raise ConfigError for unknown names."""

    def value(match: re.Match[str]) -> str:
        if (name := match[1]) not in columns:
            raise ConfigError(
                f"{setting} names {{{name}}}, which is not one of {', '.join(sorted(columns))} "
                "(agent.program.columns); put braces that are no columns into a script of agent.program.files"
            )
        return columns[name]

    return _PLACEHOLDER.sub(value, text)


def _text(value: Any) -> str:
    """Return a column as text: of messages, their contents; of other values that are not text, JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(v, dict) and "content" in v for v in value):
        return "\n\n".join(str(message["content"]) for message in value)
    return json.dumps(value)


def _json_file(value: Mapping[str, Any]) -> WorkFile:
    return WorkFile(json.dumps(value).encode())
