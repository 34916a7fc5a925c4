"""Hugging Face exports of a run while it trains: `mrl export` in a process; the driver never waits for it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from mrl.config.sections.export import ExportSection
from mrl.files import PARTIAL, partial_of
from mrl.processes.start import module_command, with_lifeline
from mrl.training.checkpoint.checkpoint_folder import name_of
from mrl.user_code import child_path

NICENESS = 10
"""Nice value of an export, which leaves the processor to training."""
STEP_FOLDER = re.compile(r"step-\d{6}")
GRACE_SECONDS = 5.0
log = logging.getLogger(__name__)


class Exports:
    """Exporter of newly saved checkpoints, one at a time. A failed export never stops training."""

    def __init__(self, section: ExportSection, run_folder: Path, *, run_name: str) -> None:
        self._section, self._run_folder = section, run_folder
        self.folder = Path(section.folder) / run_name if section.folder else run_folder / "exports"
        self._running: tuple[int, subprocess.Popen[bytes], float] | None = None
        self._waiting: int | None = None

    def request(self, step: int, *, last: bool = False) -> None:
        """Export the checkpoint of `step` at the next poll(), if due; replaces a request that still waits."""
        if not self._section.every_steps or (step % self._section.every_steps and not last):
            return
        if self._waiting is not None:
            log.warning(
                "export of step %d skipped: the previous export is still running; raise export.every_steps",
                self._waiting,
            )
        self._waiting = step

    @property
    def needed(self) -> set[int]:
        """Steps whose checkpoints must be kept."""
        running = [self._running[0]] if self._running else []
        return {*running, *([] if self._waiting is None else [self._waiting])}

    def poll(self) -> None:
        """Check the running export and start the next one. Never waits."""
        if self._running and self._ended(self._running[1], since=self._running[2]):
            self._finish()
        if self._running is None and self._waiting is not None:
            self._start(self._waiting)
            self._waiting = None

    def wait(self, *, should_stop: Callable[[], object] = lambda: None) -> None:
        """Wait until all requested exports are written or `should_stop` is true; each has its deadline."""
        self.poll()
        if self._running:
            print(f"waiting for the export of step {self._running[0]}", flush=True)
        while self._running and not should_stop():
            time.sleep(0.1)
            self.poll()

    def close(self) -> None:
        """End the running export and remove its unfinished folder."""
        self._waiting = None
        if self._running:
            self._end(self._running[1], f"export of step {self._running[0]} ended with the run")
            self._finish()

    def _start(self, step: int) -> None:
        target = self.folder / name_of(step)
        if target.exists():  # the run was resumed
            return
        words = ["export", str(self._run_folder), "--step", str(step), "--out", str(target)]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for abandoned in self.folder.glob("step-*" + PARTIAL):  # left by a killed driver
                shutil.rmtree(abandoned)
            with open(self._run_folder / "exports.log", "ab") as output:
                process = subprocess.Popen(
                    with_lifeline(module_command("mrl.cli", *words)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches only the driver
                    env=_environment(),
                )
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        except OSError as error:
            log.error("export of step %d could not start, training goes on: %s", step, error)
            return
        self._running = step, process, time.monotonic()

    def _ended(self, process: subprocess.Popen[bytes], *, since: float) -> bool:
        if process.poll() is None and time.monotonic() - since > self._section.deadline_seconds:
            self._end(
                process, f"export stopped after export.deadline_seconds = {self._section.deadline_seconds:g}"
            )
        return process.returncode is not None

    def _end(self, process: subprocess.Popen[bytes], why: str) -> None:
        log.warning("%s", why)
        process.kill()  # safe: it writes only its own files
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            log.error(
                "process %d does not end after SIGKILL; is it writing to a dead file system?", process.pid
            )

    def _finish(self) -> None:
        assert self._running is not None
        (step, process, _), self._running = self._running, None
        if process.returncode == 0:
            self._prune()
            return
        shutil.rmtree(partial_of(self.folder / name_of(step)), ignore_errors=True)
        log.error(
            "export of step %d FAILED (exit code %s), training goes on; see %s",
            step, process.returncode, self._run_folder / "exports.log",
        )  # fmt: skip

    def _prune(self) -> None:
        if self._section.keep is None:
            return
        done = sorted(path for path in self.folder.iterdir() if STEP_FOLDER.fullmatch(path.name))
        for path in done[: -self._section.keep]:
            shutil.rmtree(path, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return the driver's variables without GPUs and without MRL_SESSION, which marks processes to kill."""
    inherited = {name: value for name, value in os.environ.items() if name != "MRL_SESSION"}
    return inherited | child_path() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
