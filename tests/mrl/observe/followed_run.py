"""Start number START of a run that trains nothing: python -m tests.mrl.observe.followed_run FOLDER FIRST LAST START END.

It writes the rows of steps FIRST to LAST with a real Recorder, closes it where END is "closes", and waits to be killed.
"""

import os
import sys
import time

from mrl.config.root import Config
from mrl.loops import recorder as recorder_module
from mrl.loops.recorder import Recorder
from mrl.observe import trackers
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from tests.support.samples import make_groups, make_sample


def main(folder: str, first: int, last: int, *, attempt: int, closes: bool) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "followed", "folder": folder},
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "reward": {"kind": "maths"},
            "loop": {"steps": 10 * attempt},
            "logging": {
                "trackers": ["tensorboard", "wandb"],
                "wandb_project": "proofs",
            },
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
    print("written", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    folder, first, last, attempt, end = sys.argv[1:]
    main(folder, int(first), int(last), attempt=int(attempt), closes=end == "closes")
