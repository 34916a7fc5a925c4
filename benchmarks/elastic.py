"""Elastic slots against both fixed splits of two slots, on real engines, where responses grow in the middle of the run.

    mrl make arithmetic --out work/bench
    python -m benchmarks.elastic --out work/elastic configs/quickstart.yaml [words of a configuration]

Every response has a length of its own, drawn by its prompt and sample; from the middle on their mean is `--factor` times as
long. The splits are run in turn, `--rounds` times each. A figure is the mean of a run's steps after the warm-up; OUT has all rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.config.load import load
from mrl.config.root import Config
from mrl.launch.commands.bench_load import LogNormalLengths
from mrl.launch.commands.bench_run import rows_of, whole_run

WARM_UP = 4
OWN = ("launch.engine_slots=1", "training.layout={ep: 1, dp: 1}")
SPLITS: dict[str, tuple[str, ...]] = {
    "elastic": (*OWN, "stream.elastic_slots=true"),
    "a slot each": OWN,
    "both slots in turn": ("launch.engine_slots=0", "training.layout={ep: 2, dp: 2}"),
}
"""Settings beside those of the configuration."""


@dataclasses.dataclass(frozen=True, slots=True)
class Growing:
    """Lengths that are others from one prompt on."""

    before: LogNormalLengths
    after: LogNormalLengths
    first_prompt: int

    def __call__(self, prompt: int, sample: int) -> int:
        return (self.before if prompt < self.first_prompt else self.after)(prompt, sample)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mean", type=float, default=32.0, help="tokens of a response before they grow")
    parser.add_argument("--sigma", type=float, default=0.9, help="standard deviation of their logarithm")
    parser.add_argument("--factor", type=float, default=2.0, help="1 for lengths that stay as they are")
    parser.add_argument("--steps", type=int, default=20, help="of a run, after the warm-up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("config", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in SPLITS}
    for number in range(options.rounds):
        for name, words in SPLITS.items():
            common = ("loop.schedule=stream", "stream.max_age=1")
            config = load([options.config], [*common, *options.words, *words])
            steps = WARM_UP + options.steps
            lengths = growing(config, options.mean, options.sigma, options.factor, steps=steps)
            rows = rows_of(config, whole_run, num_steps=steps, lengths=lengths)[WARM_UP:]
            found[name].append(rows)
            (options.out / f"{name.replace(' ', '_')}-{number}.json").write_text(json.dumps(rows) + "\n")
    print("\n".join(table(found)))


def growing(config: Config, mean: float, sigma: float, factor: float, *, steps: int) -> Growing:
    """They grow where half of the steps after the warm-up are trained."""
    most, seed = config.rollout.max_response_tokens, config.run.seed
    half = WARM_UP + (steps - WARM_UP) // 2
    before, after = (LogNormalLengths(m, sigma, most, seed) for m in (mean, factor * mean))
    return Growing(before, after, half * config.loop.prompts_per_step)


def table(found: dict[str, list[list[dict[str, Any]]]]) -> list[str]:
    """Markdown: seconds a step of each run, before and after the lengths change, and the medians of all runs."""
    lines = ["| split | runs: s a step | before | after | wakes a step |", "|---|---|---|---|---|"]
    for name, runs in found.items():
        means = [_seconds(rows) for rows in runs]
        halves = [(_seconds(rows[: len(rows) // 2]), _seconds(rows[len(rows) // 2 :])) for rows in runs]
        before, after = (statistics.median(half) for half in zip(*halves, strict=True))
        wakes = statistics.fmean(row.get("stream/elastic_wakes", 0.0) for rows in runs for row in rows)
        told = ", ".join(f"{mean:.3f}" for mean in means)
        lines.append(f"| {name} | {told} | {before:.3f} | {after:.3f} | {wakes:.2f} |")
    return lines


def _seconds(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(row["time/step_seconds"] for row in rows)


if __name__ == "__main__":
    main()
