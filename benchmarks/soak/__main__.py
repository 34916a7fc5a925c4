"""Soak test: compare a run with a fault every few minutes with the same run left alone.

    python -m benchmarks.soak --out work/soak --steps 5000 --seed 0 --every-seconds 180

Three legs, each made unless OUT has it: the run left alone; a short run over two machines (network
namespaces) whose link is slow for a while, and one with a fast link; the run under faults. Commands may make
different legs at the same time (`--legs`); a command with all legs reports. The seed draws the faults into
OUT/plan.json. OUT/report.md shows each fault's outcome. Exit code 0: every check passed, 1: one failed.
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
        "--every-seconds", type=float, default=180.0, help="between faults; less for a big deck"
    )
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--disk-megabytes", type=int, default=512, help="size of the run folder's disk")
    parser.add_argument("--deck", nargs="*", default=DECK, help="TARGET:HOW (plan.py), each before any again")
    parser.add_argument("--no-link", action="store_true", help="skip the leg of two machines")
    parser.add_argument("--faults", type=int, help="number of faults, instead of --every-seconds")
    parser.add_argument("--legs", nargs="+", choices=LEGS, default=LEGS, help="make only these, no report")
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
    """Make the requested legs unless done; return (step seconds of the run left alone, machines' result)."""
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
    """Lock a leg of OUT; raise SoakError if another command makes it, or wait for that command."""
    with (out / f"{leg}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise SoakError(f"another command is making the leg {leg} of {out}; wait for its end") from None
        yield


def reported(out: Path, options: argparse.Namespace, step_seconds: float, link: dict[str, Any]) -> int:
    """Write OUT/report.md and report.json; return the exit code."""
    plan = planned(out, options, step_seconds)
    run, reference = out / "disturbed/run", out / "reference/run"
    result = report.made(
        out,
        plan,
        differences=[*differences(run, reference), *link["differences"]],
        audit=audited(run),
        extra={
            "steps": options.steps,
            "seconds of a step, left alone": round(step_seconds, 3),
            "two machines": "left out" if options.no_link else link,
        },
    )
    result.write(out)
    print("\n".join(result.lines()))
    return 0 if result.holds else 1


def left_alone(recipe: Recipe, out: Path) -> float:
    """Make or resume the run without faults in OUT/reference; return its median step seconds."""
    run_folder = out / "reference/run"
    if newest_checkpoint(run_folder) < recipe.steps:
        say("the run left alone")
        with temporary_folder() as temporary:
            usage = Usage(out / "reference-usage.jsonl", run_folder, temporary)
            words, log = recipe.command(run_folder.parent), out / "logs/reference.log"
            with Life(words, log=log, environment=environment(TMPDIR=str(temporary))) as life:
                if code := life.follow(lambda: usage.sample(life, 0)):
                    raise SoakError(f"the run left alone ended with {code}; see {log}")
    rows = metrics_log.read(run_folder / "metrics.jsonl")
    return statistics.median(row["time/step_seconds"] for row in rows)


def two_machines(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Compare runs over two machines with a slow and a fast link; return slow seconds and differences."""
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
        unequal = differences(*(folder / "run" for folder in folders))
        done.write_text(json.dumps({"seconds of slow steps": seconds[1], "differences": unequal}))
    return json.loads(done.read_text())


def planned(out: Path, options: argparse.Namespace, step_seconds: float) -> list[Fault]:
    """Return the faults of OUT/plan.json, drawn if it is missing."""
    path = out / "plan.json"
    if not path.is_file():
        number = options.faults
        if number is None and math.isnan(step_seconds):
            raise SoakError("the number of faults is unknown: set --faults, or make the leg `alone` too")
        if number is None:
            number = max(math.ceil(options.steps * step_seconds / options.every_seconds), len(options.deck))
        plan = draw(
            options.seed, steps=options.steps, number=number, save_every=options.save_every, deck=options.deck
        )
        path.write_text(json.dumps([dataclasses.asdict(fault) for fault in plan], indent=1))
    return [Fault(**fault) for fault in json.loads(path.read_text())]


def under_faults(recipe: Recipe, plan: Sequence[Fault], out: Path, megabytes: int) -> None:
    """Make the run under faults on a separate disk; copy it to OUT/disturbed, or to OUT/cut if it failed."""
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
    """Yield a temporary folder with a short name, because names of Ray's sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def audited(run_folder: Path) -> str:
    """Return the findings of `mrl audit`; empty if each prompt was trained once."""
    result = audit(run_folder)
    return "" if result.passes else audit_text(result)


def say(message: str) -> None:
    """Print a line of progress."""
    print(f"soak: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
