"""`mrl replay`: executes the record of a run's schedule in a new run folder, and compares what comes with the run to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.config.load import dump
from mrl.config.root import Config
from mrl.errors import ConfigError, DamagedCheckpoint, ReplayError
from mrl.launch.commands.assemble import Parts, assembled
from mrl.loops.arrivals.replaying import Replaying
from mrl.loops.arrivals.schedule_file import ScheduleRecord, code_digest, read_record
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.learn import TrainerRanks
from mrl.loops.recorder import Recorder
from mrl.observe.run_folder import RunFolder
from mrl.training.checkpoint.checkpoint_folder import name_of, verify_sizes


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is to be replayed, and how."""

    run: Path
    out: Path
    until: int | None = None
    """The last step; by default the record's last whole one."""
    attempt: int | None = None
    """Number of the run's start; by default its last."""
    judge_again: bool = False
    """Reward workers are asked again, and their verdicts compared; the record's are taken."""
    any_code: bool = False
    """Also where the record is of other source code."""


def replay(asked: ReplayOptions) -> str:
    """What was compared and found equal, as text. ReplayError with the first thing that differs, ConfigError where the record, the
    folder or its checkpoint does not allow it."""
    record = read_record(asked.run, asked.attempt)
    last, start = _last_step(record, asked), _checkpoint(record, asked)
    _require_code(record, asked)
    config = replay_config(record.header.config, asked.out)
    if asked.out.exists() and any(asked.out.iterdir()):
        raise ConfigError(f"--out {asked.out} is not empty; name a new folder")
    folder = RunFolder(asked.out)
    try:
        folder.write_config(dump(config), {})
        logs = folder.path.resolve() / "logs"
        logs.mkdir()
        order = Replaying(
            record, judge_again=asked.judge_again, deadline_seconds=config.loop.phase_deadline_seconds
        )
        with assembled(config, log_folder=logs, rewards=asked.judge_again, environments=False) as parts:
            _run(parts, folder, order, start, last)
    finally:
        folder.close()
    return _said(record, order, asked, last)


def replay_config(recorded: Mapping[str, Any], out: Path) -> Config:
    """The run's configuration in another folder; it tells no tracker, and writes no record of its own."""
    out = out.resolve()
    try:
        tree: dict[str, Any] = dict(recorded)
        tree["run"] = tree["run"] | {"name": out.name, "folder": str(out.parent)}
        tree["logging"] = tree["logging"] | {"trackers": []}
        stream = tree["stream"]
        tree["stream"] = stream | {"record": False, "pool": stream["pool"] | {"folder": None}}
        return Config.model_validate(tree)
    except (ValueError, KeyError, TypeError) as error:
        raise ReplayError(
            f"this release does not take the configuration that the record was made with ({error!r}); replay it with the release that "
            "wrote it (versions.json of the run names it)"
        ) from error


def _run(parts: Parts, folder: RunFolder, order: Replaying, start: Path | None, last: int) -> None:
    config, train = parts.config, parts.hybrid.train
    train.keep_frozen()
    state = None if start is None else train.load_checkpoint(start)
    recorder = Recorder(config, folder, parts.clock, first_step=0, pieces=parts.pieces)
    try:
        loop = parts.loop(recorder, _Unsaved(config, folder), arrivals=order)
        if state is not None:
            loop.restore(state)
        loop.start()
        next(number for number in loop.steps() if number == last)
    except ReplayError as error:
        raise ReplayError(f"{error}{_other_devices(order, train.device_names())}") from error
    finally:
        recorder.close()


class _Unsaved(Checkpoints):
    """The cut of a checkpoint is made where the run made it; nothing is written."""

    def save(self, trainer: TrainerRanks, *, step: int, state: Mapping[str, Any], goes_on: bool) -> None:
        pass


def _last_step(record: ScheduleRecord, asked: ReplayOptions) -> int:
    last, first = record.last_step, record.header.first_step
    if asked.until is None:
        return last
    if not first <= asked.until <= last:
        raise ConfigError(
            f"--until {asked.until}: {record.path.name} has steps {first} to {last}; for others name another --attempt"
        )
    return asked.until


def _checkpoint(record: ScheduleRecord, asked: ReplayOptions) -> Path | None:
    """What the run's start resumed from; None where it began anew."""
    first = record.header.first_step
    if first == 1:
        return None
    path = asked.run / "checkpoints" / name_of(first - 1)
    if not path.is_dir():
        raise ReplayError(
            f"{record.path.name} begins with step {first}, and {path}, which it resumed from, is gone; replay an earlier attempt "
            "(--attempt), and let coming runs keep more (loop.checkpoint.keep)"
        )
    try:
        verify_sizes(path)
    except DamagedCheckpoint as error:
        raise ReplayError(
            f"{record.path.name} begins with step {first}, and what it resumed from is damaged: {error}; replay an earlier attempt "
            "(--attempt)"
        ) from error
    return path


def _require_code(record: ScheduleRecord, asked: ReplayOptions) -> None:
    if not asked.any_code and record.header.code != code_digest():
        raise ReplayError(
            f"{record.path} was made by other source code of mrl; replay it with that one, or with --any-code, to see from where on "
            "this one does something else"
        )


def _other_devices(order: Replaying, devices: list[str]) -> str:
    made = list(order.devices)
    return "" if made == devices else f"; it was made on {made}, this is {devices}: bits may differ"


def _said(record: ScheduleRecord, order: Replaying, asked: ReplayOptions, last: int) -> str:
    counts = order.compared
    first = record.header.first_step
    text = (
        f"steps {first} to {last} of {asked.run}, {record.path.stem}: {counts['responses']:,} responses with "
        f"{counts['tokens']:,} tokens and log-probs, and the weights after each step, are equal to the bit"
    )
    if not asked.judge_again:
        return text
    others = order.other_verdicts
    found = "\n".join(others) or "all equal"
    return f"{text}\n{counts['verdicts']:,} samples judged again, {len(others)} with another reward:\n{found}"
