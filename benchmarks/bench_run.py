"""One run for measurements: a schedule over real workers in a temporary folder."""

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
    """Call `measured` with a loop of `num_steps` steps; return its metrics rows.

    There are no validations or checkpoints. `lengths` replaces the ends that the policy chooses."""
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
    """Run all steps from the start (for measured_rows)."""
    loop.start()
    loop.run()


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the configuration with changed settings in these sections."""
    values = config.model_dump()
    for name, changes in sections.items():
        values[name] |= changes
    return Config.model_validate(values)
