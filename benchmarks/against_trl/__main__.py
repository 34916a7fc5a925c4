"""Compare our GRPO step with TRL's, in turn on one machine, and with vLLM and Megatron called alone.

    python -m venv work/trl && work/trl/bin/pip install trl==1.16.0
    python -m benchmarks.against_trl --trl work/trl/bin/python --out OUT [--workloads W2 W3] [--processes 1 2]

Run nothing else: waiting threads spin, so half a core of other work makes a step several times as long. A
round is one run of each; figures are medians over the steps of all rounds. With two processes, each trainer
is data parallel over two ranks of one thread instead of one rank of two; compare each at its faster setting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.against_trl import ours
from benchmarks.against_trl.workloads import THREADS, WORKLOADS

HERE = Path(__file__).parent
MICROBATCH_SAMPLES = {"tiny": 4, "W": 256, "W2": 128, "W3": 32}
"""Samples per pass of TRL: the whole step, or what fits into memory if all are as long as the longest."""
MICROBATCH_TOKENS = 8192
DEADLINE_SECONDS = 3600.0
Spent = dict[str, list[float]]
"""Seconds of each step by phase."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_trl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trl", type=Path, help="Python of an environment with TRL; without it: no TRL")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["W", "W2", "W3"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", choices=(1, 2), default=[1], help="trainer ranks")
    parser.add_argument("--steps", type=int, default=4, help="steps per run, after one warm-up step")
    parser.add_argument("--eager", action="store_true", help="run vLLM without its compiler, here and alone")
    parser.add_argument("words", nargs="*", help="settings of our runs, as for mrl train")
    options = parser.parse_args()
    for name in options.workloads:
        rounds: dict[int, list[dict[str, Spent]]] = {count: [] for count in options.processes}
        for number, processes in itertools.product(range(options.rounds), options.processes):
            folder = options.out / name / f"round-{number}-of-{processes}"
            rounds[processes].append(_round(name, folder, processes, options))
        for processes, runs in rounds.items():
            (options.out / name / f"rounds-of-{processes}.json").write_text(json.dumps(runs, indent=1) + "\n")
            print("\n".join(_table(f"{name}, {processes} of each", runs)), flush=True)


def _round(name: str, folder: Path, processes: int, options: argparse.Namespace) -> dict[str, Spent]:
    """Measure one round; return {"ours", "trl", "alone"}: seconds of each."""
    words = [f"rollout.enforce_eager={str(options.eager).lower()}", *options.words]
    made = ours.measure(
        WORKLOADS[name],
        folder,
        steps=options.steps,
        microbatch_tokens=MICROBATCH_TOKENS,
        processes=processes,
        words=words,
    )
    theirs: Spent = {}
    if options.trl:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        script = (*launcher * (processes > 1), str(HERE / "theirs.py"), name, "--steps", str(options.steps))
        theirs = _run(
            str(options.trl),
            *script,
            "--microbatch",
            str(MICROBATCH_SAMPLES[name]),
            out=folder / "trl.json",
            threads=THREADS // processes,
        )
    alone: Spent = {}
    for which in ("vllm", "megatron") * (processes == 1):
        command = (
            sys.executable,
            "-m",
            "benchmarks.against_trl.bare",
            which,
            name,
            "--repeats",
            str(options.steps),
        )
        eager = ("--eager",) if options.eager else ()
        alone |= _run(*command, *eager, out=folder / f"{which}.json")
    return {"ours": made, "trl": theirs, "alone": alone}


def _run(*command: str, out: Path, threads: int = THREADS) -> Spent:
    """Run a program and return what it measured; raise CalledProcessError or TimeoutExpired."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    words = [*command, "--out", str(out)]
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True, timeout=DEADLINE_SECONDS
        )
    return json.loads(out.read_text())


def _table(name: str, rounds: list[dict[str, Spent]]) -> Iterator[str]:
    """Yield a Markdown table: a row per phase, and the step."""
    yield f"| {name} | ours s | TRL s | TRL / ours | alone s | ours / alone |"
    yield "|---|---|---|---|---|---|"
    for phase in ("generate", "recompute", "update", "sync", "step"):
        mrl, trl, alone = (_median(rounds, side, phase) for side in ("ours", "trl", "alone"))
        cells = [_told(mrl), _told(trl), _over(trl, mrl), _told(alone), _over(mrl, alone)]
        yield f"| {phase} | {' | '.join(cells)} |"
    lengths = (_told(_median(rounds, side, "response_tokens")) for side in ("ours", "trl"))
    yield f"| response tokens | {' | '.join(lengths)} | | | |"


def _median(rounds: list[dict[str, Spent]], side: str, phase: str) -> float | None:
    values = [value for entry in rounds for value in entry[side].get(phase, [])]
    return statistics.median(values) if values else None


def _told(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _over(first: float | None, second: float | None) -> str:
    return f"{first / second:.2f}" if first and second and second > 0.05 else ""


if __name__ == "__main__":
    main()
