"""Runs that the simulator never saw, forecast from another one and then made.

    mrl make arithmetic --out work/bench
    python -m benchmarks.stream_forecast --out work/forecast configs/quickstart.yaml [the words of `mrl bench stream`]

One run of stream with slots of the engines' own gives the times (mrl/simulation/calibrate.py). Six others that differ from it in
one thing are forecast, with the lengths that their responses will have, and the forecasts are written down
(OUT/forecasts.json) before the first of them starts. OUT has the rows of all runs too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
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
CASES: dict[str, tuple[float, tuple[str, ...]]] = {
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
    print("| run | forecast s | measured s | |\n|---|---|---|---|", flush=True)
    errors = []
    for name, (config, mean) in configs.items():
        found = statistics.fmean(row["time/step_seconds"] for row in run(name, config, mean))
        errors.append(abs(forecasts[name] / found - 1))
        print(
            f"| {name} | {forecasts[name]:.3f} | {found:.3f} | {forecasts[name] / found - 1:+.1%} |",
            flush=True,
        )
    print(f"Median of the errors {statistics.median(errors):.1%}, largest {max(errors):.1%}.")


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
