"""Three starts of a run without training, each killed: python -m tests.mrl.observe.followed_run FOLDER.
Steps 0 to 6, closed; 5 to 7, killed before closing; 5 to 9, closed. Each is a fork that logs to start-N."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

from mrl.config.root import Config
from mrl.loops import recorder as recorder_module
from mrl.loops.recorder import Recorder
from mrl.observe import trackers
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from tests.support.samples import make_groups, make_sample

STARTS = ((0, 6, True), (5, 7, False), (5, 9, True))
"""(first step, last step, is closed) of each."""


def start(folder: str, first: int, last: int, *, attempt: int, closes: bool) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "followed", "folder": folder},
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "reward": {"kind": "maths"},
            "loop": {"steps": 10 * attempt},
            "logging": {"trackers": ["tensorboard", "wandb"], "wandb_project": "proofs"},
        }
    )
    os.environ |= {"WANDB_MODE": "offline", "WANDB_RUN_GROUP": "g", "WANDB_TAGS": "a,b"}
    trackers.DEADLINE_SECONDS = 600  # a slow machine is no tracker that hangs
    recorder_module.TABLES_EVERY = 3
    run_folder = RunFolder(config.run_folder)
    recorder = Recorder(config, run_folder, PhaseClock(), first_step=first)
    for step in range(first, last + 1):
        layer = {"moe/layers/000/load_entropy": attempt + step / 100}
        recorder.samples(step, make_groups([make_sample(step, 0, response_text=f"of start {attempt}")]))
        recorder.row(step, {"reward/mean": attempt + step / 100, "val/accuracy@8": 0.5} | layer)
    if closes:
        recorder.close()


def main(folder: str) -> None:
    for name in ("torch.utils.tensorboard", "wandb"):
        importlib.import_module(name)
    for attempt, (first, last, closes) in enumerate(STARTS, 1):
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reads)
            os.dup2(os.open(Path(folder, f"start-{attempt}"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
            start(folder, first, last, attempt=attempt, closes=closes)
            os.write(writes, b"written")
            time.sleep(600)
            os._exit(1)
        os.close(writes)
        written = os.read(reads, 16)
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert written, Path(folder, f"start-{attempt}").read_text()


if __name__ == "__main__":
    main(sys.argv[1])
