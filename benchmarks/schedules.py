"""python -m benchmarks.schedules CONFIG ...: compare schedules on real engines under the same load.

Each response's length is drawn by its prompt and sample (bench_load.py), not by the policy; rewards are
hashes. So the same step of each schedule trains equally many tokens, and no group is filtered. Schedules run
in turn, each twice from its start, so that a change of the machine's speed affects all of them.

With environments, the policy ends turns and the environments give rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench_load import LogNormalLengths, hashed
from benchmarks.bench_run import changed, measured_rows, whole_run
from mrl.cli.common import CONFIG_HELP
from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.rewards.kinds.reward_section import RewardSection

ROUNDS = 2
"""Runs of each schedule."""


def schedule_overrides(schedule: str) -> list[str]:
    """Return the overrides of a schedule with settings of its section after colons.

    >>> schedule_overrides("stream:max_staleness=2:sync_every=4")
    ['loop.schedule=stream', 'stream.max_staleness=2', 'stream.sync_every=4']
    """
    name, *settings = schedule.split(":")
    return [f"loop.schedule={name}", *(f"{name}.{setting}" for setting in settings)]


def bench_stream(
    configs: Mapping[str, Config],
    *,
    num_steps: int = 15,
    warm_up: int = 3,
    sigma: float = 0.9,
    mean: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure each schedule over at least `num_steps` steps in all, after `warm_up` steps per run.

    Args:
        sigma, mean: Of response lengths without environments; None: rollout.max_response_tokens / 4.

    Returns:
        Figures by schedule; seconds are wall time.

    Raises:
        ConfigError: A number does not allow a measurement."""
    if num_steps < 1 or warm_up < 0 or sigma < 0 or (mean is not None and mean < 1):
        raise ConfigError(
            f"--steps {num_steps} and --mean {mean} must be at least 1, --warm-up {warm_up} and "
            f"--sigma {sigma} at least 0"
        )
    if mean is not None and any(config.agent for config in configs.values()):
        raise ConfigError(
            f"--mean {mean} sets drawn response lengths, but the policy ends turns of the section agent; "
            "remove one of the two"
        )
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    for _ in range(ROUNDS):
        for name, config in configs.items():
            count = warm_up + -(-num_steps // ROUNDS)
            rows[name] += measured(config, steps=count, sigma=sigma, mean=mean)[warm_up:]
    figures = {name: _figures(schedule) for name, schedule in rows.items()}
    first = next(iter(figures.values()))
    for schedule in figures.values():
        for speed_up, seconds in (("speed_up", "step_seconds"), ("mean_speed_up", "mean_step_seconds")):
            schedule[speed_up] = first[seconds] / schedule[seconds]
    return figures


def measured(config: Config, *, steps: int, sigma: float, mean: float | None) -> list[dict[str, Any]]:
    """Return the rows of one run under the load; `mean` and `sigma` as in bench_stream()."""
    return measured_rows(_loaded(config), whole_run, num_steps=steps, lengths=_lengths(config, sigma, mean))


def _loaded(config: Config) -> Config:
    """Remove the filter; replace rewards, except environments', by hashes in the configured workers."""
    if config.agent:
        return changed(config, algorithm={"filter": None})
    path = f"{hashed.__module__}:{hashed.__name__}"
    reward = RewardSection(kind="plugin", style="native", path=path, workers=config.reward.workers)
    return changed(config, reward=reward.model_dump(), algorithm={"filter": None})


def _lengths(config: Config, sigma: float, mean: float | None) -> LogNormalLengths | None:
    if config.agent:
        return None
    most = config.rollout.max_response_tokens
    return LogNormalLengths(mean or max(1.0, most / 4), sigma, most, config.run.seed)


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [float(row["time/step_seconds"]) for row in rows]
    tokens = [float(row["rollout/response_tokens_mean"] * row["rollout/samples"]) for row in rows]
    phases = sorted({name for row in rows for name in row if name.startswith("time/")})

    def mean(name: str) -> float:
        return statistics.fmean(float(row.get(name, 0.0)) for row in rows)

    return {
        "step_seconds": statistics.median(steps),
        "mean_step_seconds": statistics.fmean(steps),
        "tokens_per_second": sum(tokens) / sum(steps),
        "wait_seconds": mean("time/generate_seconds") + mean("time/reward_seconds"),
        "interrupted": mean("stream/interrupted"),
        "pause_frac": mean("stream/pause_seconds") / statistics.fmean(steps),
        "age_mean": mean("policy/staleness_mean"),
        "age_max": max(float(row["policy/staleness_max"]) for row in rows),
        "driver_frac": mean("perf/driver_frac"),
        "phases": {name[5:-8]: mean(name) for name in phases},
        "steps": steps,
        "tokens": tokens,
    }


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step s", "step_seconds", ".3f"),
    ("speed-up", "speed_up", ".2f"),
    ("mean s", "mean_step_seconds", ".3f"),
    ("speed-up", "mean_speed_up", ".2f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("waiting s", "wait_seconds", ".3f"),
    ("interrupted", "interrupted", ".1f"),
    ("age", "age_mean", ".2f"),
    ("max", "age_max", ".0f"),
    ("pause", "pause_frac", ".1%"),
    ("driver", "driver_frac", ".1%"),
)
"""(heading, figure, format)."""


def stream_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures as text, one line per schedule."""
    width = max(len(name) for name in (*figures, "schedule")) + 2
    lines = [f"{'schedule':<{width}}" + "".join(f"{heading:>11}" for heading, _, _ in COLUMNS)]
    for name, schedule in figures.items():
        values = (format(schedule[figure], form) for _, figure, form in COLUMNS)
        lines.append(f"{name:<{width}}" + "".join(f"{value:>11}" for value in values))
    counted = len(next(iter(figures.values()))["steps"])
    lines.append(
        f"step s: median of {counted} steps; the speed-ups are of medians and of means, against the first"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("config", nargs="+", help=CONFIG_HELP)
    parser.add_argument(
        "--schedules",
        default="on_policy,stream:max_staleness=2",
        help="separated by commas; settings of `stream` after colons; the first is the reference",
    )
    parser.add_argument("--steps", type=int, default=15, help="measured steps per schedule, in two runs")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each run before measuring")
    parser.add_argument("--sigma", type=float, default=0.9, help="standard deviation of the log length")
    parser.add_argument("--mean", type=float, help="mean response length; default: a quarter of the longest")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_intermixed_args(arguments)
    names = options.schedules.split(",")
    if len(set(names)) < len(names):
        parser.error(f"--schedules {options.schedules}: duplicate schedule")
    configs = {name: load_config(*options.config, *schedule_overrides(name)) for name in names}
    figures = bench_stream(
        configs, num_steps=options.steps, warm_up=options.warm_up, sigma=options.sigma, mean=options.mean
    )
    print(json.dumps(figures, indent=1) if options.json else stream_table(figures))


if __name__ == "__main__":
    main()
