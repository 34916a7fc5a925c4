"""Does a reward for each turn teach more than one for the outcome? The game of `guess`, at equal steps.

    python -m benchmarks.turn_rewards --out work/turn_rewards [--starts 0 1 2] [--steps 40] [--recipe reinforce_pp]

A start is a seed: rows, model, supervised demonstrations (a guess at random among the numbers that are still possible, or among all)
and run are made from it. Each start is trained twice from the same weights: a turn is worth the share of the doubt that it removed, or
finding the number is worth 1 and nothing else is worth anything. A run's figure is the share of its episodes that found the number
within the turns they have, as sampled in training: the mean of the last ten steps. What is done already is not run again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.learning import ROOT, mrl
from mrl.observe import metrics_log
from mrl.prepare.arithmetic import write_rows
from mrl.prepare.tokenizer import END

HIGHEST, TURNS = 63, 6
"""Who halves what is left finds each of these numbers in so many turns."""
ARMS = {"turns": ("true", 0.7), "outcome": ("false", 1.0)}
"""Name of a run -> the environment's turn_rewards, and the discount of a token: a turn has three, and is to be blamed for its own."""
KNOWING = 0.7
"""Share of the demonstrated guesses that heed what was said."""
LAST = 10
"""Steps that make a figure."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--starts", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", default="reinforce_pp", help="a file of configs/algorithm, for both arms")
    options = parser.parse_args(arguments)
    print(
        "| start | " + " | ".join(f"{arm}, first step -> last {LAST}" for arm in ARMS) + " |\n|---|---|---|"
    )
    for start in options.starts:
        folder = sft_start(options.out / f"start-{start}", start)
        shares = [found(trained(folder, arm, options)) for arm in ARMS]
        cells = (f"{each[0]:.3f} -> {sum(each[-LAST:]) / LAST:.3f}" for each in shares)
        print(f"| {start} | {' | '.join(cells)} |", flush=True)


def sft_start(folder: Path, seed: int) -> Path:
    """The folder of a start: rows and the supervised model of that seed."""
    if not (folder / "sft/config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(seed)
        rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "opening": ""} for n in range(4000)]
        write_rows(folder / "train.jsonl", rows)
        write_rows(folder / "sft.jsonl", [turn for n in range(2000) for turn in demonstration(n, rng)])
        words = [
            f"run.seed={seed}",
            f"model={{path: {folder}/model, new: {{tokenizer_files: [{folder}/train.jsonl, {folder}/sft.jsonl]}}}}",
            f"data={{train: {folder}/train.jsonl, validation: null}}",
            "training.layout={ep: 1, dp: 1}",
            f"tune={{data: {{train: {folder}/sft.jsonl}}, output: {folder}/sft}}",
        ]
        files = [ROOT / "configs/calculator.yaml", ROOT / "configs/calculator_model.yaml"]
        mrl("tune", *map(str, files), *words, log=folder / "sft.log")
    return folder


def demonstration(number: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """The turns of one game as rows of a supervised start, each with all that was said before it."""
    secret, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
    said = f"<user>{number}{END}<assistant>"
    for _ in range(TURNS):
        guess = rng.randint(low, high) if rng.random() < KNOWING else rng.randint(1, HIGHEST)
        yield {"prompt": said, "response": str(guess)}
        if guess == secret:
            return
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        said += f"{guess}{END}<user>{'higher' if guess < secret else 'lower'}{END}<assistant>"


def trained(folder: Path, arm: str, options: argparse.Namespace) -> Path:
    """The folder of a run, made where it is not there yet."""
    run = folder / f"{options.recipe}-{arm}"
    if len(found(run)) < options.steps:
        words = [
            f"run={{name: {run.name}, folder: {folder}, seed: {folder.name.rpartition('-')[2]}}}",
            f"model.path={folder}/sft",
            f"data={{train: {folder}/train.jsonl, validation: null}}",
            f"agent={{environment: guess, options: {{highest: {HIGHEST}, tries: {TURNS + 1}, turn_rewards: {ARMS[arm][0]}}}, "
            f"max_turns: {TURNS}, max_turn_tokens: 6}}",
            "training={layout: {ep: 1, dp: 1}, optimizer: {lr: 5.0e-4, min_lr: 5.0e-5}}",
            f"algorithm={{minibatches: 4, estimator: {{gamma: {ARMS[arm][1]}}}}}",
            f"loop={{steps: {options.steps}, checkpoint: {{every_steps: 0, at_end: false}}}}",
        ]
        files = [ROOT / "configs/calculator.yaml", ROOT / f"configs/algorithm/{options.recipe}.yaml"]
        mrl("train", *map(str, files), *words, log=folder / f"{run.name}.log")
    return run


def found(run: Path) -> list[float]:
    """The share of each step's episodes that found the number; the others reached the limit of turns."""
    rows = metrics_log.read(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    return [
        row.get("agent/ended_by/env_done", 0.0) / row["agent/episodes"] for row in rows if row["step"] > 0
    ]


if __name__ == "__main__":
    main()
