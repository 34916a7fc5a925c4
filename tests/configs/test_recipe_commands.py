"""A large recipe's head and its row of docs/recipes.md name its nodes, layout and hardware."""

import re

import pytest

from mrl.config.load import load
from mrl.config.sections.training import LayoutSection
from mrl.files import CONFIGS
from tests.support.recipes import RECIPES, files_of
from tests.support.source_tree import ROOT

HEADS = sorted(name for name in RECIPES if len(files_of(name)) == 1)


def layout_of(layout: LayoutSection) -> str:
    sizes = ("tp", "pp", "cp", "dp")
    gpus = " x ".join(f"{name}{getattr(layout, name)}" for name in sizes if getattr(layout, name) > 1)
    return f"{gpus}, ep{layout.ep}"


@pytest.mark.parametrize("name", HEADS)
def test_a_recipes_row_has_its_nodes_layout_and_hardware(name: str) -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `configs/{name}\.yaml` \|.*$", page, re.M)
    nodes, hardware = RECIPES[name]
    _, _, where, trainer, engines = (cell.strip() for cell in row.strip("| ").split("|"))
    config = load(files_of(name))
    assert where == f"{nodes} node{'s' if nodes > 1 else ''}, `{hardware}`"
    assert trainer == layout_of(config.training.layout)
    per_engine = config.rollout.tp * config.rollout.dp
    size = f"dp{config.rollout.dp}" if config.rollout.dp > 1 else f"tp{config.rollout.tp}"
    quantised = ", float8 blocks" if config.rollout.quantization == "fp8_block" else ""
    assert engines == f"{config.num_slots // per_engine} of {size}{quantised}"


@pytest.mark.parametrize("name", HEADS)
def test_a_recipes_head_asks_for_the_nodes_of_its_layout(name: str) -> None:
    file = CONFIGS / f"{name}.yaml"
    text, world = file.read_text(), load([file]).training.layout.world_size
    (submitted,) = re.findall(r"sbatch --nodes=(\d+) .*slurm/\S+ (\S+)", text)
    assert submitted == (str(world // 8), f"configs/{name}.yaml")
    (planned,) = re.findall(r"mrl plan +(\S+) --hardware (\S+)", text)
    assert planned == (f"configs/{name}.yaml", RECIPES[name][1])


@pytest.mark.parametrize("name", HEADS)
def test_a_run_that_is_told_to_leave_has_time_for_a_step(name: str) -> None:
    """A job of several nodes gets its signal one phase's maximum before its time limit."""
    file = CONFIGS / f"{name}.yaml"
    config = load([file])
    signals = re.findall(r"sbatch .*--signal=B:USR1@(\d+)", file.read_text())
    if config.training.layout.world_size > 8:
        assert [int(seconds) for seconds in signals] == [config.loop.phase_deadline_seconds]
