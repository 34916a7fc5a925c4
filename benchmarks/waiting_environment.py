"""What is a stream worth where environments wait? `mrl bench stream` with the game of `guess`, whose answers take 0.5 to 4 seconds.

    python -m benchmarks.waiting_environment --out work/waiting [--schedules on_policy,stream:max_age=4] [--steps 15]

The policy is the supervised start of `benchmarks.turn_rewards`, which plays games of up to six turns, with turns of the same length
whatever it learns; 32 episodes a step. Nobody computes while environments wait, so an on-policy step takes as long as its longest game.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.turn_rewards import HIGHEST, ROOT, TURNS, sft_start
from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.launch.commands.bench_stream import bench_stream, settings_of, table

SECONDS = [0.5, 4.0]
"""Bounds of what an answer takes."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schedules", default="on_policy,stream:max_age=2,stream:max_age=4")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seconds", nargs=2, type=float, default=SECONDS)
    options = parser.parse_args(arguments)
    folder = sft_start(options.out / "start-0", 0)
    configs = {name: configured(folder, name, options) for name in options.schedules.split(",")}
    print(table(bench_stream(configs, num_steps=options.steps, warm_up=options.warm_up)))


def configured(folder: Path, schedule: str, options: argparse.Namespace) -> Config:
    waits = f"[{options.seconds[0]}, {options.seconds[1]}]"
    game = f"{{highest: {HIGHEST}, tries: {TURNS + 1}, turn_rewards: false, seconds: {waits}}}"
    return load_config(
        ROOT / "configs/calculator.yaml",
        f"model.path={folder}/sft",
        f"data={{train: {folder}/train.jsonl, validation: null}}",
        f"agent={{environment: guess, options: {game}, max_turns: {TURNS}, max_turn_tokens: 6}}",
        "training.layout={ep: 1, dp: 1}",
        f"loop={{prompts_per_step: {options.prompts}, samples_per_prompt: 4}}",
        *settings_of(schedule),
    )


if __name__ == "__main__":
    main()
