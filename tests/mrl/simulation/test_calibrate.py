"""Times from a run's metrics: a run that a known machine made is forecast as that machine runs it."""

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config.load import dump, load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.pool.ledger import Admission
from mrl.rollout.pace import Pace
from mrl.simulation.calibrate import RunPlaces, calibrated
from mrl.simulation.forecast import Choice, Planner
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.world import StepTimes, World

PROMPT, MEAN, MOST = 5, 48, 384
FAST = 6
"""Slots as fast as a trainer must be that its engine keeps waiting."""


def config_of(*words: str) -> Config:
    sizes = (
        "model.max_length=400",
        f"rollout.max_response_tokens={MOST}",
        "loop.prompts_per_step=16",
        "loop.samples_per_prompt=8",
    )
    return load([CONFIGS / "quickstart.yaml"], [*sizes, *words])


def machine(*, shares_slots: bool, num_engines: int, trainer_slots: int) -> Leaves:
    return Leaves(
        EngineSpeed.linear(256, 0.003, 5e-5),
        num_engines,
        shares_slots,
        train_fixed_seconds=0.1,
        train_seconds_per_token=1.5e-4 * 2 / trainer_slots,
        sync_seconds=0.05,
        turn_seconds=0.02 if shares_slots else 0.0,
        verdict_seconds=0.03,
    )


def write_run(folder: Path, config: Config, steps: int = 40) -> None:
    """The files of a run that `machine` made; lengths move a little from step to step, as they do."""
    leaves, dice = machine(shares_slots=True, num_engines=2, trainer_slots=2), random.Random(0)
    found = []
    for step in range(steps):
        draw = log_normal(8, mean=MEAN * dice.uniform(0.8, 1.2), sigma=0.9, most=MOST)
        known = Load(draw, prompt_tokens=PROMPT, seed=step + 1)
        found.append((World(leaves, Admission(16), known, by_index=True).run(1)[0], known, 0))
    write_rows(folder, config, leaves, found)


def write_stream(folder: Path, config: Config, steps: int = 60) -> None:
    """The same of a stream whose engine has a slot of its own."""
    leaves = machine(shares_slots=False, num_engines=1, trainer_slots=FAST)
    known = Load(log_normal(8, mean=MEAN, sigma=0.9, most=MOST), prompt_tokens=PROMPT, seed=7)
    rows = World(leaves, Admission(16, config.stream.max_age), known).run(steps)
    write_rows(folder, config, leaves, [(row, known, 16 * step) for step, row in enumerate(rows)])


def write_rows(
    folder: Path, config: Config, leaves: Leaves, found: Sequence[tuple[StepTimes, Load, int]]
) -> None:
    """`found`: each step, what was asked, and the first prompt that it trained."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, (row, known, first) in enumerate(found, 1):
            lengths = sorted(n for index in range(first, first + 16) for n in known.lengths(index))
            written = {
                "step": step,
                "rollout/samples": 128.0,
                "rollout/groups": 16.0,
                "rollout/response_tokens_mean": statistics.fmean(lengths),
                "rollout/response_tokens_p99": float(lengths[math.ceil(0.99 * len(lengths)) - 1]),
                "time/generate_seconds": row.waited_seconds - leaves.verdict_seconds,
                "time/reward_seconds": leaves.verdict_seconds,
                "time/recompute_seconds": 0.25 * row.train_seconds,
                "time/update_seconds": 0.75 * row.train_seconds,
                "time/sync_seconds": 0.05,
                "time/step_seconds": row.seconds,
                "perf/tokens_per_second_per_device": row.tokens / row.seconds / 2,
            } | told(leaves.engine)
            file.write(json.dumps(written) + "\n")


def told(engine: EngineSpeed) -> dict[str, float]:
    """What engines say of some steps of theirs, among them two that begin 8 requests each beside 24 sequences."""
    pace = Pace()
    for sequences in (1, 3, 16, 40, 128):
        pace.count(sequences=sequences, begun_tokens=0, seconds=engine.step(sequences, 0))
    for _ in range(2):
        seconds = engine.step(32, 0) + 8 * PROMPT * engine.prefill_seconds
        pace.count(sequences=32, begun_tokens=8 * PROMPT, seconds=seconds)
    return pace.take()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "run"
    write_run(folder, config_of("training.layout={ep: 1, dp: 2}"))
    return folder


@pytest.mark.parametrize(("engine_slots", "max_age"), [(0, 0), (0, 2), (1, 1), (1, 2)])
def test_other_schedules_are_forecast_from_one_run(run: Path, engine_slots: int, max_age: int) -> None:
    """Within 10 % of what the machine takes, which the calibration never saw in these schedules."""
    found = calibrated(config_of("training.layout={ep: 1, dp: 2}"), run)
    places = RunPlaces(config_of("training.layout={ep: 1, dp: 2}"), found.leaves, trainer_slots=2)
    planner = Planner(places, Admission(16), found.load, steps=60)
    forecast = planner.forecast(Choice(max_age, engine_slots, 256))
    trainer = 2 - engine_slots
    leaves = machine(shares_slots=not engine_slots, num_engines=engine_slots or 2, trainer_slots=trainer)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mean = statistics.fmean(row["rollout/response_tokens_mean"] for row in rows[1:])
    known = Load(log_normal(8, mean=mean, sigma=0.9, most=MOST), prompt_tokens=PROMPT, seed=99)
    rows = World(leaves, Admission(16, max_age), known).run(80)[20:]
    assert forecast.step_seconds == pytest.approx(statistics.fmean(r.seconds for r in rows), rel=0.1)
    assert found.load.prompt_tokens == PROMPT


OWN_SLOTS = ("training.layout={ep: 1, dp: 1}", "launch.engine_slots=1", "loop.schedule=stream")


@pytest.mark.parametrize("max_age", [0, 2, 3])
def test_other_ages_are_forecast_from_a_stream(max_age: int, tmp_path: Path) -> None:
    config = config_of(*OWN_SLOTS, "stream.max_age=1")
    write_stream(tmp_path / "run", config)
    found = calibrated(config, tmp_path / "run")
    places = RunPlaces(config, found.leaves, trainer_slots=1)
    forecast = Planner(places, Admission(16), found.load, steps=60).forecast(Choice(max_age, 1, 256))
    leaves = machine(shares_slots=False, num_engines=1, trainer_slots=FAST)
    known = Load(log_normal(8, mean=MEAN, sigma=0.9, most=MOST), prompt_tokens=PROMPT, seed=99)
    rows = World(leaves, Admission(16, max_age), known).run(80)[20:]
    assert forecast.step_seconds == pytest.approx(statistics.fmean(r.seconds for r in rows), rel=0.1)


def test_the_speed_of_engines_is_what_they_tell(tmp_path: Path) -> None:
    config = config_of(*OWN_SLOTS)
    leaves = dataclasses.replace(
        machine(shares_slots=False, num_engines=1, trainer_slots=1),
        engine=EngineSpeed.linear(256, 0.004, 7e-5, prefill=2e-5),
    )
    known = Load(log_normal(8, mean=MEAN, sigma=0.9, most=MOST), prompt_tokens=PROMPT, seed=7)
    rows = World(leaves, Admission(16, 1), known).run(5)
    write_rows(tmp_path / "run", config, leaves, [(row, known, 16 * step) for step, row in enumerate(rows)])
    engine = calibrated(config, tmp_path / "run").leaves.engine
    assert engine.step(1, 0) == pytest.approx(0.00407) and engine.step(200, 0) == pytest.approx(0.018)
    assert engine.prefill_seconds == pytest.approx(2e-5)


def test_engines_that_told_nothing_of_their_steps_are_refused(run: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    old = [{name: value for name, value in row.items() if "decode" not in name} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    with pytest.raises(ConfigError, match="told nothing of their steps"):
        calibrated(config_of("training.layout={ep: 1, dp: 2}"), tmp_path)


def test_a_plan_from_a_run_needs_its_folder_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stream", "--from", str(run), "--max-age", "1", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["advised"]["speed_up"] >= 1 and tree["origin"].startswith("times and lengths of 39 steps")


def test_what_is_planned_may_differ_from_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The times are the run's own, however the words change it: half the samples train in half the time, and wait as long for the
    longest response."""
    words = ["plan", "--stream", "--from", str(run), "--max-age", "1", "--json"]
    steps = []
    for samples in (8, 4):
        changes = [f"loop.samples_per_prompt={samples}", "rollout.max_num_seqs=512"]
        assert main([*words, "launch.engine_slots=1", "training.layout={ep: 1, dp: 1}", *changes]) == 0
        steps.append(json.loads(capsys.readouterr().out)["asked"]["step_seconds"])
    assert 0.5 < steps[1] / steps[0] < 0.75


def test_runs_that_tell_no_times_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("training.layout={ep: 1, dp: 2}")
    write_run(tmp_path / "short", config, steps=2)
    with pytest.raises(ConfigError, match="has 1 steps of training"):
        calibrated(config, tmp_path / "short")
    assert main(["plan"]) == 2 and "--from RUN" in capsys.readouterr().err
