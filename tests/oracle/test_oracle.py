"""Our name tables against Megatron-Bridge's conversions (docs/design/oracle.md)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.oracle import ours, tables, tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", tables.families())
def test_a_rank_holds_what_the_bridge_put_there(family: str) -> None:
    """Names, shapes and every element, of every rank of every layout in the committed table."""
    config, table = tiny.config(family), tables.read(family)
    assert tuple(table) == tiny.layouts(family)
    for name, ranks in table.items():
        layout = tiny.LAYOUTS[name]
        assert len(ranks) == layout.world_size
        for place, theirs in zip(layout.all_coordinates(), ranks, strict=True):
            mine = ours.table(config, layout, place)
            assert {n: (tuple(shape), digest) for n, (shape, digest) in theirs["tensors"].items()} == {
                n: (tuple(shape), digest) for n, (shape, digest) in mine.items()
            }


@pytest.mark.slow
@pytest.mark.integration
def test_the_bridge_still_says_so() -> None:
    """The bridge still gives the committed tables, and its models compute what transformers' compute."""
    command = ["make", "-o", ".venv/installed", "oracle"]  # the environment that runs this is the main one
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
