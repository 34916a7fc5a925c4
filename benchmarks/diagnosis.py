"""Does `mrl diagnose` name failures that are provoked in real runs, and leave healthy ones alone?

    python -m benchmarks.diagnosis --out work/diagnosis [--seeds 0 1 2 3 4] [--kinds rate cue ...] [--healthy RUN ...]

A seed is a supervised start of the quickstart's task (benchmarks/learning.py). Each kind of failure is provoked once a seed, in a
run of a minute or two on two idle cores; what is done already is not run again. A run is named right where the first finding at its
last row is the kind's. Healthy runs are looked at after every row, and any finding there is a false alarm; `--healthy` names run
folders to look at beside those that OUT has (python -m benchmarks.learning --out OUT).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.learning import ROOT, sft_start
from mrl.config.flat import flat
from mrl.diagnosis.curves import Curves
from mrl.diagnosis.rules import diagnose
from mrl.observe import metrics_log

STEPS = 60
COMMON = (
    "loop.validation={every_steps: 5, num_prompts: 256}",
    "loop.checkpoint={every_steps: 0, at_end: false}",
    "loop.max_rollout_mismatch=null",
)
FEW = 16
"""Rows of the kind `few`."""


class Kind(NamedTuple):
    """A failure, and how it is provoked."""

    rule: str
    """What the diagnosis should find first."""
    words: tuple[str, ...]
    files: tuple[str, ...] = ("quickstart",)
    command: tuple[str, ...] = ("mrl.cli", "train")


KINDS = {
    "rate": Kind("policy_collapsed", ("training.optimizer.lr=6.0e-3", "training.optimizer.min_lr=6.0e-4")),
    "cue": Kind(
        "reward_hacked",
        (f"reward={{kind: plugin, path: '{ROOT}/benchmarks/planted_cue.py:score', workers: 1}}",),
    ),
    "critic": Kind(
        "critic_lost",
        ("critic.optimizer.lr=5.0e-2", "critic.optimizer.min_lr=5.0e-3"),
        files=("quickstart", "quickstart_ppo"),
    ),
    "stale": Kind("engines_apart", (), command=("benchmarks.stale_engines", "10")),
    "few": Kind("rows_memorised", (f"loop.prompts_per_step={FEW}", "loop.steps=100")),
}
"""Learning rates are 30 (policy) and 100 (critic) times the recipes'; engines stay at version 10."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--healthy", nargs="*", type=Path, default=[])
    options = parser.parse_args(arguments)
    right = 0
    for seed in options.seeds:
        start = sft_start(options.out, seed)
        for kind in options.kinds:
            found = judged(provoked(start, kind))
            named = next(iter(found), "nothing")
            right += named == KINDS[kind].rule
            print(f"{kind}, start {seed}: {named}, said first at {found.get(named)}", flush=True)
    healthy = [*sorted(options.out.glob("start-*/runs/*")), *options.healthy]
    alarms = {run: found for run in healthy if (found := ever(run))}
    print(f"{right} of {len(options.seeds) * len(options.kinds)} named right")
    print(f"{len(alarms)} of {len(healthy)} healthy runs with an alarm", *map(str, alarms.items()), sep="\n")


def provoked(start: Path, name: str) -> Path:
    """The folder of a failed run, made where it is not there yet."""
    kind, folder = KINDS[name], start / "provoked" / name
    if not metrics_log.read(folder / "metrics.jsonl")[STEPS:]:
        train = start / "train.jsonl"
        if name == "few":
            lines = train.read_text(encoding="utf-8").splitlines(keepends=True)
            train = start / "few.jsonl"
            train.write_text("".join(lines[:FEW]), encoding="utf-8")
        words = [
            f"run={{name: {name}, folder: {folder.parent}, seed: {start.name.rpartition('-')[2]}}}",
            f"model.path={start}/sft",
            f"data={{train: {train}, validation: {start}/validation.jsonl}}",
            f"loop.steps={STEPS}",
            *COMMON,
            *kind.words,
        ]
        files = [str(ROOT / f"configs/{file}.yaml") for file in kind.files]
        command = [sys.executable, "-m", *kind.command, *files, *words]
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=3600, check=True)
    return folder


def judged(run: Path) -> dict[str, int]:
    """The findings at the last row, the likeliest cause first, and the step at which each was said first."""
    first = ever(run)
    last = diagnose(Curves(metrics_log.read(run / "metrics.jsonl")), settings(run)).findings
    return {finding.rule: first[finding.rule] for finding in last}


def ever(run: Path) -> dict[str, int]:
    """Rule -> the step at which it fired first, looked at after every row."""
    curves, known, first = Curves(), settings(run), {}
    for row in metrics_log.read(run / "metrics.jsonl"):
        curves.add(row)
        for finding in diagnose(curves, known).findings:
            first.setdefault(finding.rule, int(row["step"]))
    return first


def settings(run: Path) -> dict[str, str]:
    return dict(flat(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
