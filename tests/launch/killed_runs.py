"""Starts of one run in sequence, each ended by a fault (benchmarks/soak/faults.py), and their outcomes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import SIGNALS
from mrl.observe.metrics_log import read, without_volatile
from mrl.report.audit import audit, audit_text
from tests.launch.command import Command
from tests.support import pretended_nodes

NO_VALIDATION = "loop.validation={every_steps: 0, before_training: false, after_training: false}"
LASTS = ("loop.phase_deadline_seconds=240", "loop.checkpoint={every_steps: 1}")
LASTS += ("launch.object_store_bytes=83886080", NO_VALIDATION)
"""Checkpoint after every step; deadlines are long enough for a loaded machine."""
CACHE = "torchinductor_"
"""Files of torch that belong to the user, not to a run."""
NAMES = {"train": "trainer rank", "engine": "engine", "vllm": "engine"}


class Chain:
    """Starts of one run; `words` returns the command's arguments for a folder."""

    def __init__(self, words: Callable[..., list[str]], folder: Path, *extra: str) -> None:
        self.folder, self._starts = folder, 0
        self.run_folder = folder / "run"
        # Names of sockets are limited, so the folder for temporary files is not below pytest's.
        self.temporary = Path(tempfile.mkdtemp(prefix="k-"))
        self._words = words(folder, "run", *extra)

    def start(self, *words: str, fault: str = "", nodes: str = "") -> Command:
        """`nodes`: the pretended node of each slot, as in 0,1."""
        self._starts += 1
        environment = {"TMPDIR": str(self.temporary), "MRL_FAULT": fault, pretended_nodes.VARIABLE: nodes}
        log = self.folder / f"start-{self._starts}.log"
        return Command("train", *self._words, *words, log=log, environment=environment)

    def finish(self, *words: str, fault: str = "", nodes: str = "") -> str:
        """Start the run, check that it ends well, and return its output."""
        with self.start(*words, fault=fault, nodes=nodes) as command:
            assert command.wait(seconds=900) == 0, command.output[-3000:]
            self.assert_nothing_left(command)
            report = audit(self.run_folder)
            assert report.passes and report.attempts == self._starts, audit_text(report)
            return command.output

    def killed(self, phase: str, target: str) -> None:
        """Start the run, kill the target in the phase of its second step, and check all promised outcomes."""
        self.ended(f"{phase}:{target}:2")
        record = self.injected()[-1]
        assert (record["phase"], record["during"], record["target"]) == (phase, phase, target)

    def ended(self, fault: str) -> float:
        """Start the run, let the fault end it, and return the seconds from the death to the message."""
        before = self.steps_saved()
        with self.start("loop.steps=1000", fault=fault) as command:
            code = command.wait(seconds=900)
            record = self.injected()[-1]
            assert_outcome(command.output, code, record)
            self.assert_nothing_left(command)
        assert (f"resuming at step {before + 1}" in command.output) == (before > 0)
        assert self.steps_saved() >= before + 1, "the start saved nothing before it was killed"
        return command.named_at - record["time"]

    def assert_nothing_left(self, command: Command) -> None:
        """Check that no process, segment, socket, temporary file or cgroup is left within 60 s."""
        command.assert_nothing_left()
        deadline = time.monotonic() + 60
        while (left := self._left(command)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"left behind: {left}"
        command.assert_no_segment_left()

    def _left(self, command: Command) -> list[str]:
        left = {name for name in os.listdir(self.temporary) if not name.startswith(CACHE)}
        return sorted(left) + command.cgroups()

    def injected(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / "faults.jsonl").read_text().splitlines()]

    def steps_saved(self) -> int:
        folder = self.run_folder / "checkpoints"
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        return max((int(n[5:]) for n in names if re.fullmatch(r"step-\d+", n)), default=0)

    def rows(self) -> list[dict[str, object]]:
        """Return what equal runs share; a step that died in its weight sync has no sync metrics."""
        rows = [without_volatile(row) for row in read(self.run_folder / "metrics.jsonl")]
        return [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows]

    def remove(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def assert_outcome(output: str, code: int, record: Mapping[str, Any]) -> None:
    """Check the exit code of a run that a fault ended, and its one line with worker and phase."""
    target, how = record["target"], record["how"]
    if target == "driver":
        announced = f"{SIGNALS[how].name}: finishing this step" in output
        assert code == (-signal.SIGKILL if how == "kill" else 128 + signal.SIGTERM), output[-3000:]
        assert announced == (how == "term"), output[-3000:]
        return
    lines = [line for line in output.splitlines() if line.startswith("mrl: ")]
    kind, _, number = target.partition("-")
    assert code == 1 and len(lines) == 1 and "(raylet)" not in output, output[-3000:]
    assert lines[0].endswith("; the same command resumes from the last checkpoint"), lines[0]
    assert re.search(rf"{NAMES[kind]} .*died in phase {record['during']}", lines[0]), output[-3000:]
    if kind == "train":
        assert f"trainer rank {number}" in lines[0], lines[0]
    if kind == "vllm":
        assert re.search(r"engine \d+ lost its process VllmWorker", lines[0]), lines[0]
