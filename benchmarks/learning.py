"""Check that each shipped recipe learns, from several SFT models of the quickstart's task.

    python -m benchmarks.learning --out work/learning [--recipes grpo dapo] [--starts 0 1 2]

A start is a seed for the model, its SFT and the run; `make quickstart` uses seed 0. A run's figure is the
mean of its last three validation accuracies (512 rows, greedy); no run is stopped early or left out. Runs are
bit-reproducible, so a busy machine changes no figure. OUT keeps finished runs; the table has all of them.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mrl.config.load import load
from mrl.observe import metrics_log

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.85
"""Figure of a recipe that learned the task; the SFT models are below 0.5."""
MISSED = ("cispo", "gspo")
"""Recipes below it in docs/benchmarks.md."""
TUNE_STEPS = {1: 180, 2: 230}
"""SFT steps of a start, if not 200, for a loss of about 0.5 (0.516, 0.505, 0.534) and an accuracy below 0.5.
When the loss falls depends on the seed and on the commit."""
LAST = 3
"""Number of readings in a figure."""
RATE = 2.0e-4
"""The quickstart's learning rate, for one update per step; n updates per step use RATE / sqrt(n)."""
CRITIC_RATE = 1.0e-3
"""The same for a critic."""
SCHEDULE = "schedule: linear, schedule_unit: steps, warmup_steps: 10, weight_decay: 0.0"

UPDATES = {"dapo": 16, "cispo": 16, "gspo": 4, "ppo": 16}
"""Optimizer steps of each role per step, if more than one."""
LENGTHS = {
    "dapo": ["algorithm.shaping.overlong.max_tokens=6", "algorithm.shaping.overlong.buffer_tokens=2"],
    "dr_grpo": ["algorithm.aggregation.length=6"],
}
"""The task's lengths, for recipes whose files have their papers' lengths."""
QUICKSTARTS = {
    "quickstart": ("quickstart",),
    "quickstart_dapo": ("quickstart", "quickstart_dapo"),
    "quickstart_ppo": ("quickstart", "quickstart_ppo"),
}
"""The task's own recipes and their files, in order."""
RECIPES = (*QUICKSTARTS, *sorted(path.stem for path in (ROOT / "configs/algorithm").glob("*.yaml")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES)
    parser.add_argument("--starts", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args(arguments)
    for recipe in options.recipes:
        for start in options.starts:
            readings = train(sft_start(options.out, start), recipe)
            print(f"{recipe}, start {start}: {readings[0]:.3f} -> {figure(readings):.3f}", flush=True)
    print("\n".join(table(options.out)))


def sft_start(out: Path, start: int) -> Path:
    """Make a start's folder, if missing (rows, tokenizer, SFT model of that seed); return it."""
    folder = out / f"start-{start}"
    if not (folder / "sft/config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        mrl("make", "arithmetic", "--out", str(folder), log=folder / "make.log")
        words = [
            f"run={{seed: {start}, folder: {folder}/sft-runs}}",
            f"model.path={folder}/model",
            f"data={{train: {folder}/train.jsonl, validation: {folder}/validation.jsonl}}",
            f"tune={{data: {{train: {folder}/sft.jsonl}}, output: {folder}/sft, "
            f"steps: {TUNE_STEPS.get(start, 200)}}}",
        ]
        files = [ROOT / "configs/quickstart.yaml", ROOT / "configs/quickstart_model.yaml"]
        mrl("tune", *map(str, files), *words, log=folder / "sft.log")
    return folder


@functools.cache
def steps_of(recipe: str) -> int:
    """Return a recipe's steps: those of its own file if it is for this task, else the quickstart's; its
    DAPO's if a step makes more than one update.
    >>> steps_of("quickstart_ppo"), steps_of("grpo"), steps_of("gspo")
    (200, 300, 200)
    """
    like = "quickstart_dapo" if recipe in UPDATES else "quickstart"
    return load(_files(recipe if recipe in QUICKSTARTS else like)).loop.steps


def train(folder: Path, recipe: str) -> list[float]:
    """Run a recipe, if not done; return its readings, the first before training."""
    if (readings := readings_of(folder, recipe)) is None:
        words = [
            f"run={{name: {recipe}, folder: {folder}/runs, seed: {folder.name.rpartition('-')[2]}}}",
            f"model.path={folder}/sft",
            f"data={{train: {folder}/train.jsonl, validation: {folder}/validation.jsonl}}",
            f"loop.steps={steps_of(recipe)}",
        ]
        mrl("train", *files_and_words(recipe), *words, log=folder / f"{recipe}.log")
        readings = readings_of(folder, recipe)
        assert readings is not None, f"{recipe} has no last reading; see {folder}/{recipe}.log"
    return readings


def files_and_words(recipe: str) -> list[str]:
    """Return arguments of `mrl train`: the recipe's files, the task's lengths, rates by the updates."""
    files = _files(recipe)
    if recipe in QUICKSTARTS:
        return files
    words = [f"training.optimizer={_optimizer(RATE, recipe)}", *LENGTHS.get(recipe, [])]
    if recipe == "ppo":
        words.append(f"critic.optimizer={_optimizer(CRITIC_RATE, recipe)}")
    return [*files, *words]


def _files(recipe: str) -> list[str]:
    names = QUICKSTARTS.get(recipe, ("quickstart", f"algorithm/{recipe}"))
    return [str(ROOT / f"configs/{name}.yaml") for name in names]


def _optimizer(rate: float, recipe: str) -> str:
    lr = rate / math.sqrt(UPDATES.get(recipe, 1))
    return f"{{lr: {lr:.3g}, min_lr: {lr / 10:.3g}, decay_steps: {steps_of(recipe)}, {SCHEDULE}}}"


def readings_of(folder: Path, recipe: str) -> list[float] | None:
    """Return the validation accuracies of a run that reached its last step, else None."""
    path = folder / "runs" / recipe / "metrics.jsonl"
    rows = {row["step"]: row for row in metrics_log.read(path)} if path.is_file() else {}
    if "val/reward" not in rows.get(steps_of(recipe), {}):
        return None
    return [row["val/reward"] for _, row in sorted(rows.items()) if "val/reward" in row]


def figure(readings: Sequence[float]) -> float:
    """Return the mean of the last readings.

    >>> figure([0.2, 0.8, 0.9, 1.0])
    0.9
    """
    return sum(readings[-LAST:]) / LAST


def table(out: Path) -> Iterator[str]:
    """Yield a Markdown table: per recipe with a run, each start's figure and their mean."""
    starts = sorted(out.glob("start-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    yield f"| recipe | updates a step | {' | '.join(f.name.replace('-', ' ') for f in starts)} | mean |"
    yield "|---|---|" + "---|" * (len(starts) + 1)
    for recipe in RECIPES:
        runs = [readings_of(folder, recipe) for folder in starts]
        done = [readings for readings in runs if readings is not None]
        if done:
            cells = ["" if r is None else f"{r[0]:.3f} -> {figure(r):.3f}" for r in runs]
            mean = sum(map(figure, done)) / len(done)
            yield f"| {recipe} | {UPDATES.get(recipe, '')} | {' | '.join(cells)} | {mean:.3f} |"


def mrl(*words: str, log: Path, seconds: float = 3 * 3600.0) -> None:
    """Run a command with its output in `log`; raise CalledProcessError or TimeoutExpired."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as stream:
        subprocess.run(
            [sys.executable, "-m", "mrl.cli", *words],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=True,
        )


if __name__ == "__main__":
    main()
