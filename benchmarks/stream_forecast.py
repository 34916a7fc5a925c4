"""Runs that the simulator never saw, forecast from another one and then made.

    mrl make arithmetic --out work/bench
    python -m benchmarks.stream_forecast --out work/forecast configs/quickstart.yaml [the words of `mrl bench stream`]

One run of stream with slots of the engines' own gives the times (mrl/simulation/calibrate.py). Six others that differ from it in
one thing are forecast, with the lengths that their responses will have, and the forecasts are written down
(OUT/forecasts.json) before the first of them starts. OUT has the rows of all runs too.

A machine is not as fast at noon as it was at eleven, which no forecast knows. So the calibrated configuration is forecast and run
again as the others are, in each of the rounds, and the second error is of how many times its step the others take.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrl.config.load import load
from mrl.config.root import Config
from mrl.launch.commands.bench_load import LogNormalLengths
from mrl.launch.commands.bench_stream import measured
from mrl.pool.room import admission_of
from mrl.simulation.calibrate import leaves_of
from mrl.simulation.leaves import Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.world import World

SIGMA = 0.9
WARM_UP = 4
CALIBRATED = ("loop.schedule=stream", "stream.max_age=1")
AGAIN = "as calibrated"
CASES: dict[str, tuple[float, tuple[str, ...]]] = {
    AGAIN: (1.0, ()),
    "on policy": (1.0, ("loop.schedule=on_policy",)),
    "max_age 2": (1.0, ("stream.max_age=2",)),
    "max_age 4": (1.0, ("stream.max_age=4",)),
    "twice the prompts a step": (1.0, ("loop.prompts_per_step=32",)),
    "responses of half the length": (0.5, ()),
    "32 sequences at once": (1.0, ("rollout.max_num_seqs=32",)),
}
"""Factor of the mean length, and settings beside the calibrated run's."""
PROMPT_TOKENS = 6


class MeasuredLoad(Load):
    """The lengths of `mrl bench stream`, response by response."""

    def __init__(self, config: Config, mean: float) -> None:
        samples, longest = config.loop.samples_per_prompt, config.rollout.max_response_tokens
        super().__init__(
            log_normal(samples, mean=mean, sigma=SIGMA, most=longest), prompt_tokens=PROMPT_TOKENS
        )
        self._lengths = LogNormalLengths(mean, SIGMA, longest, config.run.seed)

    def lengths(self, index: int) -> list[int]:
        return [self._lengths(index, sample) for sample in range(self.samples)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream_forecast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mean", type=float, default=48.0, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=16, help="of a run, after the warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="in which all are run in turn")
    parser.add_argument("config", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    def config_of(*words: str) -> Config:
        return load([options.config], [*options.words, *CALIBRATED, *words])

    def run(name: str, config: Config, mean: float) -> list[dict[str, float]]:
        rows = measured(config, steps=WARM_UP + options.steps, sigma=SIGMA, mean=mean)[WARM_UP:]
        (options.out / f"{name.replace(' ', '_')}.json").write_text(json.dumps(rows) + "\n")
        return rows

    first = config_of()
    leaves = leaves_of(first, run("calibrated", first, options.mean))
    configs = {name: (config_of(*words), factor * options.mean) for name, (factor, words) in CASES.items()}
    forecasts = {
        name: forecast(leaves, config, mean, steps=options.steps) for name, (config, mean) in configs.items()
    }
    (options.out / "forecasts.json").write_text(json.dumps(forecasts, indent=1) + "\n")
    found: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(options.rounds):
        for name, (config, mean) in configs.items():
            rows = run(f"{name} {number}", config, mean)
            found[name].append(statistics.fmean(row["time/step_seconds"] for row in rows))
    print("\n".join(table(forecasts, found)))


def table(forecasts: Mapping[str, float], found: Mapping[str, Sequence[float]]) -> list[str]:
    """Markdown: each run's forecast, its steps in each round, and both errors; their medians over the six."""
    lines = [
        "| run | forecast s | measured s | error | of the calibrated run's step |",
        "|---|---|---|---|---|",
    ]
    errors: list[tuple[float, float]] = []
    for name, seconds in found.items():
        own = forecasts[name] / statistics.fmean(seconds) - 1
        times = statistics.fmean(s / base for s, base in zip(seconds, found[AGAIN], strict=True))
        relative = forecasts[name] / forecasts[AGAIN] / times - 1
        told = ", ".join(f"{s:.3f}" for s in seconds)
        lines.append(f"| {name} | {forecasts[name]:.3f} | {told} | {own:+.1%} | {relative:+.1%} |")
        if name != AGAIN:
            errors.append((abs(own), abs(relative)))
    for which, column in zip(("errors", "errors of the share"), zip(*errors, strict=True), strict=True):
        lines.append(f"Median of the {which} {statistics.median(column):.1%}, largest {max(column):.1%}.")
    return lines


def forecast(leaves: Leaves, config: Config, mean: float, *, steps: int) -> float:
    """Mean seconds of a step."""
    engine, admission = leaves.engine.with_capacity(config.rollout.max_num_seqs), admission_of(config)
    if on_policy := config.loop.schedule == "on_policy":
        admission = dataclasses.replace(admission, max_age=0)
    world = World(
        dataclasses.replace(leaves, engine=engine), admission, MeasuredLoad(config, mean), by_index=on_policy
    )
    return statistics.fmean(row.seconds for row in world.run(WARM_UP + steps)[WARM_UP:])


if __name__ == "__main__":
    main()
