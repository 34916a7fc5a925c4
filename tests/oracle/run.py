"""Convert every family's tiny model with Megatron-Bridge; write tests/oracle/tables, or report differences.

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
NOT_READ = ("llama_yarn", "qwen3_moe_yarn", "qwen3_next_yarn", "kimi_k25")
"""Forms whose YaRN the bridge does not read, and text below images. Their tensors are other forms'."""
BOUND = 1e-5
"""Of a log-prob's difference in float32."""
TOKENS = torch.arange(7, 71) * 13 % 131
"""Some, all different."""


def main() -> None:
    """Write the tables, or exit with status 1 if the committed ones differ."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m tests.oracle")
    parser.add_argument("what", choices=["write", "check"])
    parser.add_argument("families", nargs="*")
    args = parser.parse_args()
    wrong = []
    for family in args.families or [name for name in FAMILIES if name not in NOT_READ]:
        with tempfile.TemporaryDirectory() as folder:
            result = table(family, Path(folder))
        print(json.dumps({"family": family} | summary(result)), flush=True)
        if args.what == "write":
            tables.write(family, result)
        elif without_gap(result) != without_gap(tables.read(family)):
            wrong.append(f"{family} is other than in tests/oracle/tables")
        if not summary(result).get("gap", 0.0) < BOUND:
            wrong.append(f"{family}: log-probs differ from transformers' by more than {BOUND}")
    if wrong:
        raise SystemExit("\n".join(wrong))


def table(family: str, folder: Path) -> dict[str, Any]:
    """Return the bridge's results for one family: layout -> ranks."""
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
    """Run calls in parallel forks; this process computes nothing, as its threads would not survive a fork."""
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
    """Write the result of `work` or its traceback; drop what it prints."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        result = work(*args)
    except BaseException:
        result = {"error": traceback.format_exc()[-3000:]}
    file.write_text(json.dumps(result))


def write_models(family: str, folder: Path) -> None:
    tiny.write_numbered(folder / "numbered", family)
    tiny.write(folder / "random", family)


def convert(layout: Layout, rank: int, folder: Path) -> dict[str, Any]:
    """Return one rank's part of the table; on a single rank, also the log-probs' difference."""
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


def without_gap(result: dict[str, Any]) -> dict[str, Any]:
    """Return a table without values that depend on the machine's arithmetic."""
    return {
        name: [{key: value for key, value in rank.items() if key != "gap"} for rank in ranks]
        for name, ranks in result.items()
        if name != "unknown"
    }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Summarise a table for people and for docs/design/oracle.md."""
    if "unknown" in result:
        return result
    ranks = [rank for ranks in result.values() for rank in ranks]
    if errors := [rank["error"] for rank in ranks if "error" in rank]:
        return {"error": errors[0], "gap": math.inf}
    return {
        "tensors": [len(rank["tensors"]) for rank in ranks],
        "lost": sorted({name for rank in ranks for name in rank["lost"]}),
        "gap": result["one"][0]["gap"],
    }
