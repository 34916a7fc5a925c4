"""The times of the simulator's parts from the metrics of one run.

| leaf | from |
|---|---|
| lengths | log-normal with the mean and the 99th percentile of the run's responses |
| a decode step of b sequences, a + c b, and a token of a prompt | what the engines told of their steps (mrl/rollout/pace.py), least squares, none below 0 |
| training, fixed + tokens / rate | recompute, estimate and update over the step's tokens, least squares; the rate goes with the trainer's slots |
| verdicts, weight sync, park | medians of reward, sync and park |
| turn, or on own slots a part of training's fixed one | what is left of a step, median |

In a run of stream with slots of the engines' own both work at once, so that what they take from each other on one machine is in
the times; those of an on_policy run are of each alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.observe import metrics_log
from mrl.rollout.pace import PREFILL, by_size
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.places import with_engine_slots

FEWEST_ROWS = 3
"""Steps of a run that are asked for; the first one warms up and does not count."""
_NORMAL_99 = 2.3263
"""Standard deviations below which 99 % of a normal distribution lie."""

Row = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What one run told."""

    load: Load
    leaves: Leaves
    """Of the run's own placement."""
    steps: int
    """That were looked at."""


class RunPlaces:
    """The placements of a configuration's slots, with the times of a run of the same model."""

    def __init__(self, config: Config, measured: Leaves, *, trainer_slots: int) -> None:
        """`measured`: of the run, whose trainer had so many slots."""
        found = {n: with_engine_slots(config, n) for n in range(0, config.num_slots, config.rollout.ranks)}
        self._configs = {n: placed for n, placed in found.items() if placed is not None}
        self._measured, self._trainer_slots = measured, trainer_slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._configs)

    def leaves(self, engine_slots: int) -> Leaves:
        """Engines as they were; the trainer's rate by its slots; nobody takes turns where engines have their own."""
        config = self._configs[engine_slots]
        slower = self._trainer_slots / config.training.layout.world_size
        return dataclasses.replace(
            self._measured,
            engine=self._measured.engine.with_capacity(config.rollout.max_num_seqs),
            num_engines=config.num_engines * config.rollout.dp,
            shares_slots=not engine_slots,
            train_seconds_per_token=self._measured.train_seconds_per_token * slower,
        )

    def problems(self, engine_slots: int) -> list[str]:
        """None that a run's metrics would tell; memory is `mrl plan`'s without --stream."""
        return []


def calibrated(run: Config, folder: Path, *, asked: Config | None = None) -> Calibration:
    """From the metrics of a run of the configuration `run`; the load is that of `asked`, which may differ in samples and longest
    response. ConfigError where it has too few steps, or tells nothing of its engines."""
    rows = [row for row in metrics_log.read(folder / "metrics.jsonl") if row.get("rollout/samples")][1:]
    if len(rows) < FEWEST_ROWS:
        raise ConfigError(
            f"{folder}/metrics.jsonl has {len(rows)} steps of training after the first; at least {FEWEST_ROWS} are needed"
        )
    return Calibration(_load(run, rows, like=asked or run), leaves_of(run, rows), len(rows))


def _load(run: Config, rows: Sequence[Row], *, like: Config) -> Load:
    mean, sigma = _lengths(rows)
    prompt = round(statistics.median(_prompt_tokens(row, run) for row in rows))
    draw = log_normal(
        like.loop.samples_per_prompt, mean=mean, sigma=sigma, most=like.rollout.max_response_tokens
    )
    filtered = 1 - statistics.fmean(row.get("group/kept_frac", 1.0) for row in rows)
    has_filter = run.algorithm.filter is not None
    return Load(
        draw, prompt_tokens=max(0, prompt), filtered=filtered if has_filter else 0.0, seed=run.run.seed
    )


def leaves_of(config: Config, rows: Sequence[Row]) -> Leaves:
    """The times of a run from its rows. ConfigError where they tell nothing of its engines' steps."""
    return dataclasses.replace(_beside_engines(config, rows), engine=_decoding(config, rows))


def _lengths(rows: Sequence[Row]) -> tuple[float, float]:
    """(mean, deviation of the logarithm) of the responses; a percentile at the longest one says that it was cut there."""
    mean = statistics.fmean(row["rollout/response_tokens_mean"] for row in rows)
    high = statistics.fmean(row["rollout/response_tokens_p99"] for row in rows)
    if high <= mean:
        return mean, 0.0
    # high / mean = exp(z s - s^2 / 2), whose largest value is exp(z^2 / 2); beyond it s = z
    root = _NORMAL_99**2 - 2 * math.log(high / mean)
    return mean, _NORMAL_99 - math.sqrt(max(0.0, root))


def _prompt_tokens(row: Row, config: Config) -> float:
    """Mean prompt of a step's samples: its tokens, as its rate tells them, less the responses."""
    tokens = row["perf/tokens_per_second_per_device"] * row["time/step_seconds"] * config.num_slots
    trained = row["rollout/groups"] * config.loop.samples_per_prompt
    return tokens / trained - row["rollout/response_tokens_mean"]


def _beside_engines(config: Config, rows: Sequence[Row]) -> Leaves:
    """All but the engines' speed."""
    tokens = [
        row["perf/tokens_per_second_per_device"] * row["time/step_seconds"] * config.num_slots for row in rows
    ]
    learning = [sum(row.get(f"time/{name}_seconds", 0.0) for name in LEARNING) for row in rows]
    train_fixed, per_token = _fit([(1.0, n) for n in tokens], learning)
    named = (*LEARNING, "generate", "reward", "sync", "park")
    rest = max(
        0.0,
        statistics.median(
            row["time/step_seconds"] - sum(row.get(f"time/{name}_seconds", 0.0) for name in named)
            for row in rows
        ),
    )
    shares = not config.launch.engine_slots
    return Leaves(
        engine=EngineSpeed.linear(config.rollout.max_num_seqs, 1.0),
        num_engines=config.num_engines * config.rollout.dp,
        shares_slots=shares,
        train_fixed_seconds=train_fixed + (0.0 if shares else rest),
        train_seconds_per_token=per_token,
        sync_seconds=statistics.median(row.get("time/sync_seconds", 0.0) for row in rows),
        park_seconds=statistics.median(row.get("time/park_seconds", 0.0) for row in rows),
        turn_seconds=rest if shares else 0.0,
        verdict_seconds=statistics.median(row.get("time/reward_seconds", 0.0) for row in rows),
    )


def _decoding(config: Config, rows: Sequence[Row]) -> EngineSpeed:
    """Of one engine, by the steps of all: what a row has of so many sequences counts by what it took."""
    counted = [told for row in rows for told in by_size(row)]
    if not counted:
        raise ConfigError(
            "the run's engines told nothing of their steps (rollout/decode_steps/<sequences> of its metrics), as those of versions "
            "before did; make such a run again"
        )
    fixed, each = _fit([(steps, tokens) for steps, tokens, _ in counted], [told for *_, told in counted])
    begun = [[row.get(name, 0.0) for row in rows] for name in PREFILL]
    steps, decoded, seconds, tokens = map(sum, begun)
    prefill = max(0.0, seconds - fixed * steps - each * decoded) / max(1.0, tokens)
    return EngineSpeed.linear(config.rollout.max_num_seqs, fixed, each, prefill=prefill)


LEARNING: tuple[str, ...] = ("recompute", "estimate", "update")
"""Phases of the trainer."""


def _fit(features: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """The two weights, neither below 0, whose sums come nearest to the seconds in the squares."""
    known, wanted = np.array(features, dtype=np.float64), np.array(seconds, dtype=np.float64)
    both = np.linalg.lstsq(known, wanted, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    single = [float(known[:, n] @ wanted / (known[:, n] @ known[:, n])) for n in range(2)]
    errors = [float(np.square(known[:, n] * single[n] - wanted).sum()) for n in range(2)]
    return (single[0], 0.0) if errors[0] <= errors[1] else (0.0, single[1])
