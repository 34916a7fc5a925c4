"""Does `mrl diagnose` name failures that are provoked in real runs, and leave healthy ones alone?

    python -m benchmarks.diagnosis --out work/diagnosis [--seeds 0 1 2 3 4] [--kinds rate cue ...] [--workers 2] [--healthy RUN ...]

A seed is a supervised start of the quickstart's task (benchmarks/learning.py). Each kind of failure is provoked once a seed, in a
short run on one slot; what is done already is not run again. A run is named right where the first finding at its last row is the
kind's. Healthy runs, those of the kinds in HEALTHY and the run folders that `--healthy` names, are looked at after every row, and any
finding there is a false alarm. The table at the end is of all runs in OUT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.learning import ROOT, mrl, sft_start
from mrl.config.flat import flat
from mrl.diagnosis.curves import Curves
from mrl.diagnosis.rules import diagnose
from mrl.observe import metrics_log

COMMON = (
    "training.layout={ep: 1, dp: 1}",
    "rollout.max_num_seqs=512",
    "loop.prompts_per_step=64",
    "loop.validation={every_steps: 5, num_prompts: 256}",
    "loop.checkpoint={every_steps: 0, at_end: false}",
    "loop.max_rollout_mismatch=null",
)
"""One slot: half the processes to start, of which a short run mostly consists."""
FEW = 16
"""Rows of the kinds `few` and `solved`."""


class Kind(NamedTuple):
    """A failure, and how it is provoked."""

    rule: str | None
    """What the diagnosis should find first; None: a healthy run, in which it should never find anything."""
    steps: int
    words: tuple[str, ...] = ()
    files: tuple[str, ...] = ("quickstart",)
    command: tuple[str, ...] = ("mrl.cli", "train")


KINDS = {
    "rate": Kind(
        "policy_collapsed", 25, ("training.optimizer.lr=6.0e-3", "training.optimizer.min_lr=6.0e-4")
    ),
    "cue": Kind(
        "reward_hacked",
        30,
        (f"reward={{kind: plugin, path: '{ROOT}/benchmarks/planted_cue.py:score', workers: 1}}",),
    ),
    "critic": Kind(
        "critic_lost",
        45,
        ("critic.optimizer.lr=5.0e-2", "critic.optimizer.min_lr=5.0e-3"),
        files=("quickstart", "quickstart_ppo"),
    ),
    "stale": Kind("engines_apart", 25, command=("benchmarks.stale_engines", "10")),
    "few": Kind("rows_memorised", 60, (f"loop.prompts_per_step={FEW}",)),
    "solved": Kind("data_solved", 20, (f"loop.prompts_per_step={FEW}",)),
}
"""Learning rates are 30 (policy) and 100 (critic) times the recipes'; engines stay at version 10; rows are solved because
they were learned by heart before."""
HEALTHY = {
    "healthy": Kind(None, 45),
    "healthy_ppo": Kind(None, 45, files=("quickstart", "quickstart_ppo")),
    "healthy_dapo": Kind(None, 45, files=("quickstart", "quickstart_dapo")),
}
RUNS = KINDS | HEALTHY


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, a slot each")
    parser.add_argument("--healthy", nargs="*", type=Path, default=[])
    options = parser.parse_args(arguments)
    starts = [sft_start(options.out, seed) for seed in options.seeds]
    with ThreadPoolExecutor(options.workers) as pool:
        for told in pool.map(lambda run: sentence(provoked(*run)), product(starts, options.kinds)):
            print(told, flush=True)
    print("\n".join(table(options.out, options.healthy)))


def provoked(start: Path, name: str) -> Path:
    """The folder of a run of this kind, made where it is not there yet."""
    kind, folder = RUNS[name], start / "provoked" / name
    if not done(folder):
        words = [
            f"run={{name: {name}, folder: {folder.parent}, seed: {start.name.rpartition('-')[2]}}}",
            f"model.path={known_by_heart(start) if name == 'solved' else start / 'sft'}",
            f"data={{train: {rows_of(start, name)}, validation: {start}/validation.jsonl}}",
            *COMMON,
            f"loop.steps={kind.steps}",
            *kind.words,
        ]
        files = [str(ROOT / f"configs/{file}.yaml") for file in kind.files]
        command = [sys.executable, "-m", *kind.command, *files, *words]
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=3600, check=True)
    return folder


def done(run: Path) -> bool:
    """Whether the run has reached its kind's last step."""
    last = max((row["step"] for row in metrics_log.read(run / "metrics.jsonl")), default=-1)
    return last >= RUNS[run.name].steps


def rows_of(start: Path, name: str) -> Path:
    """The training rows of a kind: the task's, or its first few."""
    if name not in ("few", "solved"):
        return start / "train.jsonl"
    lines = (start / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    few = start / "few.jsonl"
    few.write_text("".join(lines[:FEW]), encoding="utf-8")
    return few


def known_by_heart(start: Path) -> Path:
    """The start's model after a hundred supervised steps on the few rows alone."""
    folder = start / "by_heart"
    if not (folder / "config.json").is_file():
        rows = map(json.loads, rows_of(start, "solved").read_text(encoding="utf-8").splitlines())
        lines = [json.dumps({"prompt": row["prompt"], "response": row["answer"]}) + "\n" for row in rows]
        (start / "by_heart.jsonl").write_text("".join(lines), encoding="utf-8")
        words = [
            f"model={{path: {start}/sft, max_length: 16}}",
            "training.layout={ep: 1, dp: 1}",
            f"data={{train: {start}/train.jsonl, validation: {start}/validation.jsonl}}",
            f"tune={{data: {{train: {start}/by_heart.jsonl}}, output: {folder}, steps: 100, batch_rows: {FEW}, optimizer: {{lr: 1.0e-3}}}}",
        ]
        mrl("tune", str(ROOT / "configs/quickstart.yaml"), *words, log=start / "by_heart.log")
    return folder


def sentence(run: Path) -> str:
    """What was found in a run, and when it was said first."""
    first = ever(run)
    told = ", ".join(f"{rule} at {step}" for rule, step in first.items()) or "nothing"
    return f"{run.parent.parent.name} {run.name}: {named(run) or 'nothing'} (said first: {told})"


def named(run: Path) -> str | None:
    """The first finding at the last row, which is the likeliest cause."""
    found = diagnose(Curves(metrics_log.read(run / "metrics.jsonl")), settings(run)).findings
    return found[0].rule if found else None


def ever(run: Path) -> dict[str, int]:
    """Rule -> the step at which it fired first, looked at after every row."""
    curves, known, first = Curves(), settings(run), {}
    for row in metrics_log.read(run / "metrics.jsonl"):
        curves.add(row)
        for finding in diagnose(curves, known).findings:
            first.setdefault(finding.rule, int(row["step"]))
    return first


def table(out: Path, others: Sequence[Path]) -> Iterator[str]:
    """Markdown: a row a kind with each start's name and the step at which it was said first; then the two counts."""
    starts = sorted(out.glob("start-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    yield f"| kind | {' | '.join(start.name.replace('-', ' ') for start in starts)} |"
    yield "|---|" + "---|" * len(starts)
    right, judged = 0, 0
    for name, kind in KINDS.items():
        cells = []
        for run in (start / "provoked" / name for start in starts):
            found = named(run) if done(run) else None
            judged, right = judged + done(run), right + (found == kind.rule)
            cells.append(f"`{found}` at {ever(run)[found]}" if found else "nothing" if done(run) else "")
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield f"{right} of {judged} named right"
    healthy = [run for name in HEALTHY for run in out.glob(f"start-*/provoked/{name}") if done(run)]
    healthy += others
    alarms = {run: found for run in healthy if (found := ever(run))}
    rows = sum(len(list(metrics_log.read(run / "metrics.jsonl"))) for run in healthy)
    yield f"{len(alarms)} of {len(healthy)} healthy runs ({rows} rows) with an alarm"
    yield from (f"{run}: {found}" for run, found in alarms.items())


def settings(run: Path) -> dict[str, str]:
    return dict(flat(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
