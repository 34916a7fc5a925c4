"""Tasks of Harbor: a command-line agent works in a task's image, and the task's tests grade what it left.

`mrl make harbor` (mrl/prepare/harbor_tasks.py) makes the rows and the folder that this reads:

| path in the folder | content |
|---|---|
| `rows.jsonl` | a row per task: `prompt` has the instruction, `harbor` the fields of HarborTask |
| `tasks/NAME/work` | the image's files of the task's working folder |
| `tasks/NAME/tests` | the task's tests: only the grade gets them |
| `roots/IMAGE` | root file system of an unpacked image |

Harbor runs the tests in the agent's container, or in a separate one that gets the task's `artifacts`. Here
all tests run in a fresh sandbox, which gets the working folder as the agent left it, or the artifacts in it.
The rest of the file system and the processes are new: a verifier's programs cannot be replaced.

A verifier that writes no reward also runs on the untouched task. If it writes one there, the agent's files
are to blame, and the reward is 0. If not, the verifier is: the trajectory has no reward.

Source of the format: https://www.harborframework.com/docs/tasks and the package harbor (0.26.0, Apache-2.0).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mrl.agents.environment import Model, SandboxLost, Step, Unreachable
from mrl.agents.envs.command_program import CHECK_SECONDS, BootSlots, booted, command_limits, require_command
from mrl.agents.sandboxes.providers import Exit, Sandbox, TooLarge, find_provider, model_variables
from mrl.agents.sandboxes.work_files import WorkFile, matches, overlay, read_folder
from mrl.config.sections.programs import SandboxSection
from mrl.errors import ConfigError

LOGS, TESTS, SOLUTION = "/logs", "/tests", "/solution"
"""Folders of every task's sandbox, by Harbor's names."""
_LOG_FOLDERS = ("agent", "artifacts", "verifier")
_ARTIFACTS = ["artifacts/*"]
"""What a grade gets of LOGS."""
_REWARDS = ("verifier/reward.json", "verifier/reward.txt")
"""Where a verifier writes the reward below LOGS; the first one that exists counts."""
_IN_FOLDER = 'cd "$1" && shift && exec "$@"'


@dataclasses.dataclass(frozen=True, slots=True)
class HarborTask:
    """A task, as `mrl make harbor` writes it into a row's column `harbor`."""

    name: str
    """Path of its folder below `tasks`."""
    image: str
    """Name of its image."""
    root: str | None
    """Name of the image's folder in `roots`, if it was unpacked: what bubblewrap takes for the image."""
    workdir: str
    keep: Sequence[str]
    """Patterns of the files below the working folder that a grade gets."""
    env: Mapping[str, str]
    """Variables of the image and the task."""
    verifier_env: Mapping[str, str]
    agent_seconds: float | None
    verifier_seconds: float
    cpus: float | None
    memory_mib: int | None


class Harbor:
    """Program of a task (`environment.Program`)."""

    about: ClassVar[str] = ""
    """Its sandbox, for the log."""
    _boots: ClassVar[BootSlots | None] = None

    def __init__(
        self,
        folder: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        memory_mib: int = 2048,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the options of `agent.options`.

        Args:
            folder: Written by `mrl make harbor`.
            command: The agent; {prompt} stands for the instruction.
            env: Further environment variables of the agent.
            seconds: In place of each task's own limit of the agent's time; None: the task's, else 1200.
            memory_mib: Limit of tasks that name none.
            sandbox: Settings as of `agent.program.sandbox`; the image, and CPUs if a task names them, are the
                task's.
        """
        self._folder, self._command = Path(folder).absolute(), list(command)
        self._env, self._seconds, self._memory_mib = dict(env or {}), seconds, memory_mib
        self._sandbox = SandboxSection(**(sandbox or {}))
        self._provider = find_provider(self._sandbox.kind, self._sandbox.options)

    @classmethod
    def prepare(cls, *, sandbox: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Open the first task's sandbox once; raise ConfigError for what is missing."""
        program = cls(sandbox=sandbox, **options)
        cls._boots = BootSlots(program._sandbox.boots)
        rows = program._folder / "rows.jsonl"
        try:
            with rows.open() as lines:
                first = HarborTask(**json.loads(next(lines))["harbor"])
        except (OSError, StopIteration, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"agent.options.folder: {rows} is no file of tasks ({error!r}); `mrl make harbor` writes it"
            ) from error
        try:
            with program.opened(first, CHECK_SECONDS, None) as opened:
                for name in ("sh", *program._command[:1]):
                    require_command(opened, name)
                cls.about = opened.describe()
        except (SandboxLost, TooLarge) as error:
            raise ConfigError(f"agent.options.sandbox: {error}") from error

    def run(self, task: dict[str, Any], seed: int, model: Model) -> Step:
        """Run the agent on a task and grade what it left."""
        harbor = HarborTask(**task["harbor"])
        text = task["prompt"] if isinstance(task["prompt"], str) else task["prompt"][-1]["content"]
        command = [word.replace("{prompt}", text) for word in self._command]
        seconds = self._seconds or harbor.agent_seconds or 1200.0
        try:
            done, kept, logs = self.work(harbor, command, seconds, env=self._env, seed=seed, model=model)
        except TooLarge as error:
            return Step(reward=0.0, info={"reason": str(error)})
        reward, why = self.score(harbor, kept, logs)
        reason = "" if done.status == 0 else f"the agent: {done}"
        return Step(reward=reward, info={"reason": "; ".join(filter(None, (reason, why)))})

    def work(
        self,
        task: HarborTask,
        command: Sequence[str],
        seconds: float,
        *,
        files: Mapping[str, WorkFile] | None = None,
        env: Mapping[str, str] | None = None,
        seed: int = 0,
        model: Model | None = None,
    ) -> tuple[Exit, dict[str, WorkFile], dict[str, WorkFile]]:
        """Run a command in a task's working folder.

        Args:
            files: Files of SOLUTION, a folder that is there only with them.

        Returns:
            How it ended, and what a grade gets of the working folder and of LOGS. Raises TooLarge.
        """
        with self.opened(task, seconds, model, [SOLUTION] if files else []) as sandbox:
            try:
                sandbox.write(self._files(task, "work"), task.workdir)
                if files:
                    sandbox.write(files, SOLUTION)
            except TooLarge as error:
                raise ConfigError(
                    f"the task {task.name!r} needs a larger sandbox.disk_mib: {error}"
                ) from error
            variables = {**task.env, **model_variables(sandbox), "MRL_SEED": str(seed), **(env or {})}
            done = sandbox.run(_in_folder(task, command), seconds=seconds, env=variables)
            return done, sandbox.read(task.keep, task.workdir), sandbox.read(_ARTIFACTS, LOGS)

    def score(
        self, task: HarborTask, kept: Mapping[str, WorkFile], logs: Mapping[str, WorkFile]
    ) -> tuple[float, str]:
        """Return the reward of what an agent left, and why it is 0 if the verifier wrote none. Raise
        Unreachable if the verifier writes none on the untouched task either."""
        reward, why = self.verify(task, kept, logs)
        if reward is None:
            untouched, problem = self.verify(task)
            if untouched is None:
                raise Unreachable(f"the verifier of the task {task.name!r} gives no reward: {problem}")
        return reward or 0.0, why

    def verify(
        self,
        task: HarborTask,
        kept: Mapping[str, WorkFile] | None = None,
        logs: Mapping[str, WorkFile] | None = None,
    ) -> tuple[float | None, str]:
        """Run a task's tests on what an agent left, or on the untouched task.

        Returns:
            The reward, or None and why the verifier gave none.
        """
        work = self._files(task, "work")
        if kept is not None:  # the agent's folder in place of the image's: deleted files are missing, too
            work = overlay(
                kept,
                {p: file for p, file in work.items() if file.kind != "file" or not matches(p, task.keep)},
            )
        with self.opened(task, task.verifier_seconds, None, [TESTS]) as sandbox:
            try:
                sandbox.write(self._files(task, "tests"), TESTS)
                sandbox.write(work, task.workdir)
                sandbox.write(logs or {}, LOGS)
            except TooLarge as error:
                return None, str(error)
            command = _in_folder(task, [f"{TESTS}/test.sh"])
            env = {**task.env, **task.verifier_env}
            done = sandbox.run(command, seconds=task.verifier_seconds, env=env)
            if done.timed_out:
                return None, f"the verifier: {done}"
            try:
                files = sandbox.read(_REWARDS, LOGS)
            except TooLarge as error:
                return None, str(error)
        reward = read_reward(files)
        return reward, "" if reward is not None else f"no reward in {LOGS}/verifier; the verifier: {done}"

    @contextlib.contextmanager
    def opened(
        self, task: HarborTask, seconds: float, model: Model | None, folders: Sequence[str] = ()
    ) -> Iterator[Sandbox]:
        """Open a sandbox with a task's image and limits, and with empty folders for its logs. A command in it
        takes at most so many seconds."""
        settings = self._sandbox
        limits = command_limits(
            settings, seconds, memory_mib=task.memory_mib or self._memory_mib, cpus=task.cpus or settings.cpus
        )
        image = task.image if task.root is None else str(self._folder / "roots" / task.root)
        places = [task.workdir, LOGS, *folders]
        with booted(
            self._provider, settings, self._boots, image=image, limits=limits, model=model, folders=places
        ) as sandbox:
            sandbox.write(dict.fromkeys(_LOG_FOLDERS, WorkFile(kind="folder")), LOGS)
            yield sandbox

    def _files(self, task: HarborTask, kind: str) -> dict[str, WorkFile]:
        files = read_folder(self._folder / "tasks" / task.name / kind)
        if kind == "tests":
            files["test.sh"] = dataclasses.replace(files["test.sh"], is_executable=True)
        return files


def read_reward(files: Mapping[str, WorkFile]) -> float | None:
    """Return the reward that a verifier wrote: a number, or an object with the key `reward` or one key alone.
    None if there is none that is finite."""
    for path in _REWARDS:
        if path in files:
            try:
                value = json.loads(files[path].data) if path.endswith(".json") else float(files[path].data)
                if isinstance(value, dict):
                    value = value["reward"] if len(value) != 1 else next(iter(value.values()))
                return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
            except (ValueError, KeyError, OverflowError, RecursionError):
                return None
    return None


def _in_folder(task: HarborTask, command: Sequence[str]) -> list[str]:
    return ["sh", "-c", _IN_FOLDER, "sh", task.workdir, *command]
