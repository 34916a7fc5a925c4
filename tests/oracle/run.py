"""Converts every family's tiny model with Megatron-Bridge, and writes tests/oracle/tables or says what differs from them.

Every layout's ranks are forked from a process that has imported the bridge once and computes nothing itself.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from mrl.models.layout import Layout
from tests.oracle import tables, tiny
from tests.oracle.bridge import Converted, place
from tests.tiny_models import FAMILIES

DEADLINE = 300.0
"""Seconds for the ranks of one layout."""
NOT_READ = ("llama_yarn", "qwen3_moe_yarn", "qwen3_next_yarn")
"""Forms whose YaRN the bridge does not read. Their tensors are those of the forms without it."""
BOUND = 1e-5
"""Of a log-prob's difference in float32."""
TOKENS = torch.arange(7, 71) * 13 % 131
"""Some, all different."""


def main() -> None:
    """Writes the tables, or exits with status 1 where the committed ones say otherwise."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m tests.oracle")
    parser.add_argument("what", choices=["write", "check"])
    parser.add_argument("families", nargs="*")
    args = parser.parse_args()
    wrong = []
    for family in args.families or [name for name in FAMILIES if name not in NOT_READ]:
        with tempfile.TemporaryDirectory() as folder:
            found = table(family, Path(folder))
        print(json.dumps({"family": family} | summary(found)), flush=True)
        if args.what == "write":
            tables.write(family, found)
        elif without_gap(found) != without_gap(tables.read(family)):
            wrong.append(f"{family} is other than in tests/oracle/tables")
        if not summary(found).get("gap", 0.0) < BOUND:
            wrong.append(f"{family}: log-probs differ from transformers' by more than {BOUND}")
    if wrong:
        raise SystemExit("\n".join(wrong))


def table(family: str, folder: Path) -> dict[str, Any]:
    """What the bridge makes of one family: layout -> ranks."""
    (written,) = forked([(write_models, family, folder)])
    result: dict[str, Any] = {}
    if written is not None:
        return {"one": [written]}
    for name in tiny.layouts(family):
        layout = tiny.LAYOUTS[name]
        ranks = forked([(convert, layout, rank, folder) for rank in range(layout.world_size)])
        if "unknown" in ranks[0]:
            return ranks[0]
        result[name] = ranks
    return result


def forked(calls: list[tuple[Any, ...]]) -> list[Any]:
    """The results of functions in processes of their own, beside each other; this one computes nothing, since what it
    started would not be in its children."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(calls))]
        processes: list[Any] = [
            context.Process(target=answer, args=(file, *call), daemon=True)
            for file, call in zip(files, calls, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE)
        for process in processes:
            process.kill()
        return [json.loads(file.read_text()) if file.exists() else {"error": "no answer"} for file in files]


def answer(file: Path, work: Any, *args: Any) -> None:
    """Writes what `work` returns, or its traceback; what it prints is dropped."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        result = work(*args)
    except BaseException:
        result = {"error": traceback.format_exc()[-3000:]}
    file.write_text(json.dumps(result))


def write_models(family: str, folder: Path) -> None:
    """Both forms of the tiny model."""
    tiny.write_numbered(folder / "numbered", family)
    tiny.write(folder / "random", family)


def convert(layout: Layout, rank: int, folder: Path) -> dict[str, Any]:
    """One rank's part of the table; the log-probs' difference where it is the only rank."""
    with place(layout, rank, folder / f"meeting-{layout.world_size}"):
        try:
            converted = Converted.of(folder / "numbered", layout)
        except ValueError as error:
            if "not yet supported" in str(error):
                return {"unknown": True}
            raise
        result: dict[str, Any] = {"tensors": converted.held(), "lost": converted.lost()}
        if layout.world_size == 1:
            result["gap"] = Converted.of(folder / "random", layout).gap(TOKENS)
        return result


def without_gap(found: dict[str, Any]) -> dict[str, Any]:
    """A table without what depends on the machine's arithmetic."""
    return {
        name: [{key: value for key, value in rank.items() if key != "gap"} for rank in ranks]
        for name, ranks in found.items()
        if name != "unknown"
    }


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """For people, and for docs/design/oracle.md."""
    if "unknown" in found:
        return found
    ranks = [rank for ranks in found.values() for rank in ranks]
    if errors := [rank["error"] for rank in ranks if "error" in rank]:
        return {"error": errors[0], "gap": math.inf}
    return {
        "tensors": [len(rank["tensors"]) for rank in ranks],
        "lost": sorted({name for rank in ranks for name in rank["lost"]}),
        "gap": found["one"][0]["gap"],
    }
