"""One run for measurements: a configured schedule over real workers, in a folder that is gone afterwards."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.launch.commands.start_run import Parts, assembled
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.recorder import Recorder
from mrl.loops.schedule import Schedule
from mrl.observe import metrics_log
from mrl.observe.run_folder import RunFolder
from mrl.rollout.request import Lengths


def measured_rows(
    config: Config,
    measured: Callable[[Parts, Schedule], None],
    *,
    num_steps: int,
    lengths: Lengths | None = None,
) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that `measured` made with a loop at its first step, of at most `num_steps`, without
    validation and checkpoints. `lengths`: of each response, instead of where the policy would end it."""
    validation = {"every_steps": 0, "before_training": False, "after_training": False, "num_prompts": 1}
    loop = {"validation": validation, "checkpoint": {"every_steps": 0, "at_end": False}, "steps": num_steps}
    with tempfile.TemporaryDirectory(prefix="mrl-bench-") as folder:
        config = changed(config, loop=loop, run={"folder": folder})
        run_folder = RunFolder(config.run_folder)
        with assembled(config, log_folder=Path(folder) / "logs") as parts:
            parts = dataclasses.replace(parts, lengths=lengths)
            recorder = Recorder(config, run_folder, parts.clock, first_step=0)
            measured(parts, parts.loop(recorder, Checkpoints(config, run_folder)))
            recorder.close()
        rows = metrics_log.read(run_folder.metrics)
        run_folder.close()
    return rows


def whole_run(parts: Parts, loop: Schedule) -> None:
    """Run all steps from the start; an argument of measured_rows()."""
    loop.start()
    loop.run()


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with other values of some settings of these sections."""
    values = config.model_dump()
    for name, changes in sections.items():
        values[name] |= changes
    return Config.model_validate(values)
