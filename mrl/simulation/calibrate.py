"""The times of the simulator's parts from the metrics of one on_policy run.

| leaf | from |
|---|---|
| lengths | log-normal with the mean and the 99th percentile of the run's responses |
| a decode step of b sequences, a + c b | generate's seconds over the steps and tokens that such lengths take, least squares, neither below 0 |
| training, fixed + tokens / rate | recompute, estimate and update over the step's tokens, likewise; the rate goes with the trainer's slots |
| verdicts, weight sync | medians of reward and sync |
| turn | what is left of a step, median |
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.observe import metrics_log
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.places import with_engine_slots

FEWEST_ROWS = 3
"""Steps of a run that are asked for; the first one warms up and does not count."""
DRAWS = 16
"""Of the lengths of each step."""
_NORMAL_99 = 2.3263
"""Standard deviations below which 99 % of a normal distribution lie."""

Row = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What one run told."""

    load: Load
    places: RunPlaces
    steps: int
    """That were looked at."""


class RunPlaces:
    """The placements of a run's slots, with its times."""

    def __init__(self, config: Config, measured: Leaves) -> None:
        """`measured`: the leaves of the placement that the configuration has."""
        found = {n: with_engine_slots(config, n) for n in range(0, config.num_slots, config.rollout.ranks)}
        self._configs = {n: placed for n, placed in found.items() if placed is not None}
        self._measured, self._trainer_slots = measured, config.training.layout.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self._configs)

    def leaves(self, engine_slots: int) -> Leaves:
        """Engines as they were; the trainer's rate by its slots; nobody takes turns where engines have their own."""
        config = self._configs[engine_slots]
        slower = self._trainer_slots / config.training.layout.world_size
        return dataclasses.replace(
            self._measured,
            num_engines=config.num_engines * config.rollout.dp,
            shares_slots=not engine_slots,
            train_seconds_per_token=self._measured.train_seconds_per_token * slower,
        )

    def problems(self, engine_slots: int) -> list[str]:
        """None that a run's metrics would tell; memory is `mrl plan`'s without --stream."""
        return []


def calibrated(config: Config, folder: Path) -> Calibration:
    """From the metrics of a run of this configuration. ConfigError where it was no on_policy run, or has too few steps."""
    if config.loop.schedule != "on_policy":
        raise ConfigError(
            f"{folder}: a run of loop.schedule = {config.loop.schedule}, whose phases overlap; calibrate from one of on_policy"
        )
    rows = [row for row in metrics_log.read(folder / "metrics.jsonl") if row.get("rollout/samples")][1:]
    if len(rows) < FEWEST_ROWS:
        raise ConfigError(
            f"{folder}/metrics.jsonl has {len(rows)} steps of training after the first; at least {FEWEST_ROWS} are needed"
        )
    samples = config.loop.samples_per_prompt
    mean, sigma = _lengths(rows)
    prompt = round(statistics.median(_prompt_tokens(row, config) for row in rows))
    draw = log_normal(samples, mean=mean, sigma=sigma, most=config.rollout.max_response_tokens)
    filtered = 1 - statistics.fmean(row.get("group/kept_frac", 1.0) for row in rows)
    has_filter = config.algorithm.filter is not None
    load = Load(
        draw, prompt_tokens=max(0, prompt), filtered=filtered if has_filter else 0.0, seed=config.run.seed
    )
    return Calibration(load, RunPlaces(config, _leaves(config, rows)), len(rows))


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


def _leaves(config: Config, rows: Sequence[Row]) -> Leaves:
    engines, most = config.num_engines * config.rollout.dp, config.rollout.max_num_seqs
    counted = [_decoded(config, row, engines) for row in rows]
    fixed, each = _fit(counted, [row["time/generate_seconds"] for row in rows])
    tokens = [
        row["perf/tokens_per_second_per_device"] * row["time/step_seconds"] * config.num_slots for row in rows
    ]
    learning = [sum(row.get(f"time/{name}_seconds", 0.0) for name in LEARNING) for row in rows]
    train_fixed, per_token = _fit([(1.0, n) for n in tokens], learning)
    named = (*LEARNING, "generate", "reward", "sync")
    rest = [
        row["time/step_seconds"] - sum(row.get(f"time/{name}_seconds", 0.0) for name in named) for row in rows
    ]
    return Leaves(
        engine=EngineSpeed.linear(most, fixed, each),
        num_engines=engines,
        shares_slots=not config.launch.engine_slots,
        train_fixed_seconds=train_fixed,
        train_seconds_per_token=per_token,
        sync_seconds=statistics.median(row.get("time/sync_seconds", 0.0) for row in rows),
        turn_seconds=max(0.0, statistics.median(rest)),
        verdict_seconds=statistics.median(row.get("time/reward_seconds", 0.0) for row in rows),
    )


LEARNING: tuple[str, ...] = ("recompute", "estimate", "update")
"""Phases of the trainer."""


def _decoded(config: Config, row: Row, engines: int) -> tuple[float, float]:
    """(decode steps, tokens) of the engine that takes longest, with lengths like the step's: means of a few draws."""
    groups_asked = round(row["rollout/samples"] / config.loop.samples_per_prompt)
    most, found = config.rollout.max_response_tokens, []
    mean, sigma = _lengths([row])
    draw = log_normal(config.loop.samples_per_prompt, mean=mean, sigma=sigma, most=most)
    for seed in range(DRAWS):
        groups = draw(np.random.default_rng(seed), groups_asked)
        shares = [groups[number::engines].ravel().tolist() for number in range(engines)]
        found.append(max(_steps(share, config.rollout.max_num_seqs) for share in shares))
    return statistics.fmean(s for s, _ in found), statistics.fmean(t for _, t in found)


def _steps(lengths: Sequence[int], capacity: int) -> tuple[int, int]:
    """(decode steps, tokens) of responses that are begun in this order, so many at a time."""
    ends: list[int] = []
    for tokens in lengths:
        begins = heapq.heappop(ends) if len(ends) == capacity else 0
        heapq.heappush(ends, begins + tokens)
    return max(ends, default=0), sum(lengths)


def _fit(features: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """The two weights, neither below 0, whose sums come nearest to the seconds in the squares."""
    known, wanted = np.array(features, dtype=np.float64), np.array(seconds, dtype=np.float64)
    both = np.linalg.lstsq(known, wanted, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    single = [float(known[:, n] @ wanted / (known[:, n] @ known[:, n])) for n in range(2)]
    errors = [float(np.square(known[:, n] * single[n] - wanted).sum()) for n in range(2)]
    return (single[0], 0.0) if errors[0] <= errors[1] else (0.0, single[1])
