"""Days without a fault, in hours: a run under a fault every few minutes, against the same run left alone.

    python -m benchmarks.soak --out work/soak --steps 5000 --seed 0 --every-seconds 180

Three legs, each done once and not again where OUT has it: the run left alone; a short run over two machines (network namespaces) whose
link is slow for a while, against one whose link is not; the run under faults. Two commands may make two legs beside each other (`--legs`), never the same
one; the one that finds or makes all of them reports. Which faults come at which steps is drawn by the seed and in OUT/plan.json before the first. OUT/report.md says what became of each. Exit code 0: all that it names holds, bit for bit where it says so; 1: something does not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import report, slow_link
from benchmarks.soak.clock import Clock
from benchmarks.soak.disk import mounted, own_mounts
from benchmarks.soak.disturbed import Disturbed, Places
from benchmarks.soak.life import Life, SoakError
from benchmarks.soak.plan import DECK, Fault, draw
from benchmarks.soak.recipe import Recipe, environment, newest_checkpoint
from benchmarks.soak.usage import SHARED_MEMORY, Usage
from benchmarks.soak.weights import differences
from mrl.observe import metrics_log
from mrl.report.audit import audit, audit_text

LEGS = ("alone", "machines", "faults")
SHARED_MEGABYTES = 4096
LINK_STEPS = 24
SLOW_STEPS = range(8, 16)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--every-seconds",
        type=float,
        default=180.0,
        help="of the run left alone; fewer where the deck needs it",
    )
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--disk-megabytes", type=int, default=512, help="of the run folder's file system")
    parser.add_argument(
        "--deck", nargs="*", default=DECK, help="TARGET:HOW (plan.py), each once before any again"
    )
    parser.add_argument("--no-link", action="store_true", help="without the leg of two machines")
    parser.add_argument(
        "--faults", type=int, help="their number, instead of --every-seconds, which needs the run left alone"
    )
    parser.add_argument(
        "--legs", nargs="+", choices=LEGS, default=LEGS, help="makes these alone, and no report"
    )
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(out / "data", options.steps, options.save_every)
    with contextlib.ExitStack() as held:
        for leg in options.legs:
            held.enter_context(nobody_else(out, leg))
        made = legs(recipe, out, options)
    return reported(out, options, *made) if set(options.legs) == set(LEGS) else 0


def legs(recipe: Recipe, out: Path, options: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Makes those that are asked for and not there; the seconds of a step, left alone, and what came of the two machines."""
    with nobody_else(out, "data", waits=True):
        recipe.prepare()
    own_mounts()
    step_seconds, link = math.nan, {"differences": []}
    with mounted(SHARED_MEMORY, SHARED_MEGABYTES):
        if "alone" in options.legs:
            step_seconds = left_alone(recipe, out)
        if "machines" in options.legs and not options.no_link:
            link = two_machines(recipe, out)
        if "faults" in options.legs:
            plan = planned(out, options, step_seconds)
            if not (out / "disturbed").is_dir():
                under_faults(recipe, plan, out, options.disk_megabytes)
    return step_seconds, link


@contextlib.contextmanager
def nobody_else(out: Path, leg: str, *, waits: bool = False) -> Iterator[None]:
    """SoakError where another command makes this leg of OUT, which is not done before its folder is written; or waits for it."""
    with (out / f"{leg}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise SoakError(f"another command makes the leg {leg} of {out}; wait for its end") from None
        yield


def reported(out: Path, options: argparse.Namespace, step_seconds: float, link: dict[str, Any]) -> int:
    """OUT/report.md and report.json; the exit code."""
    plan = planned(out, options, step_seconds)
    run, reference = out / "disturbed/run", out / "reference/run"
    found = report.made(
        out,
        plan,
        differences=[*differences(run, reference), *link["differences"]],
        audit=audited(run),
        more={
            "steps": options.steps,
            "seconds of a step, left alone": round(step_seconds, 3),
            "two machines": "left out" if options.no_link else link,
        },
    )
    found.write(out)
    print("\n".join(found.lines()))
    return 0 if found.holds else 1


def left_alone(recipe: Recipe, out: Path) -> float:
    """The run without faults, in OUT/reference; seconds of a step, the median. It resumes where it was cut."""
    run_folder = out / "reference/run"
    if newest_checkpoint(run_folder) < recipe.steps:
        say("the run that is left alone")
        with temporary_folder() as temporary:
            usage = Usage(out / "reference-usage.jsonl", run_folder, temporary)
            words, log = recipe.command(run_folder.parent), out / "logs/reference.log"
            with Life(words, log=log, environment=environment(TMPDIR=str(temporary))) as life:
                if code := life.follow(lambda: usage.sample(life, 0)):
                    raise SoakError(f"the run that is left alone ended with {code}; see {log}")
    rows = metrics_log.read(run_folder / "metrics.jsonl")
    return statistics.median(row["time/step_seconds"] for row in rows)


def two_machines(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Seconds that the slow steps took, and whether the two runs over two machines are one another's equals."""
    done = out / "two-machines.json"
    if reason := slow_link.impossible():
        return {"left out": reason, "differences": []}
    if not done.is_file():
        say("two machines")
        short = dataclasses.replace(recipe, steps=LINK_STEPS, save_every=LINK_STEPS)
        folders = [out / "fast-link", out / "slow-link"]
        seconds = []
        for folder, slow in zip(folders, (range(0), SLOW_STEPS), strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            seconds.append(round(slow_link.run(short, folder, slow=slow), 1))
        found = differences(*(folder / "run" for folder in folders))
        done.write_text(json.dumps({"seconds of slow steps": seconds[1], "differences": found}))
    return json.loads(done.read_text())


def planned(out: Path, options: argparse.Namespace, step_seconds: float) -> list[Fault]:
    """What OUT/plan.json has, which is drawn where it is not there."""
    path = out / "plan.json"
    if not path.is_file():
        number = options.faults
        if number is None and math.isnan(step_seconds):
            raise SoakError("how many faults? --faults says it, or the run left alone with --every-seconds")
        if number is None:
            number = max(math.ceil(options.steps * step_seconds / options.every_seconds), len(options.deck))
        plan = draw(
            options.seed, steps=options.steps, number=number, save_every=options.save_every, deck=options.deck
        )
        path.write_text(json.dumps([dataclasses.asdict(fault) for fault in plan], indent=1))
    return [Fault(**fault) for fault in json.loads(path.read_text())]


def under_faults(recipe: Recipe, plan: Sequence[Fault], out: Path, megabytes: int) -> None:
    """The run of the faults, on a disk of its own, from its first step; what it wrote is in OUT/disturbed once it is done, and else in OUT/cut."""
    say(f"{len(plan)} faults")
    for name in ("events.jsonl", "usage.jsonl", "cut", "copied"):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).unlink(missing_ok=True)
    with mounted(out / "disk", megabytes) as disk, temporary_folder() as temporary:
        places = Places(out, disk, temporary)
        try:
            Disturbed(recipe, plan, places, Clock(out)).run()
        except BaseException:
            shutil.copytree(disk, out / "cut", dirs_exist_ok=True)
            raise
        shutil.copytree(disk, out / "copied")
        (out / "copied").rename(out / "disturbed")


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """With a short name, because those of Ray's sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def audited(run_folder: Path) -> str:
    """What `mrl audit` finds; empty where each prompt was trained once."""
    found = audit(run_folder)
    return "" if found.passes else audit_text(found)


def say(what: str) -> None:
    """A line of progress."""
    print(f"soak: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
