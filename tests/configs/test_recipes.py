"""Every recipe and every layout beside it resolves, survives a round trip, and fits the hardware in its name."""

import time
from pathlib import Path

import pytest

from launch.plan.build import plan_report
from launch.plan.hardware import CONFIGS, load_hardware
from mrl.cli import main
from mrl.config.load import dump, load

RECIPES = {"qwen3_30b_a3b": (1, "8x80gb"), "qwen3_235b_a22b": (16, "8x80gb"), "deepseek_v3": (64, "8x80gb")}
"""Recipe -> nodes and hardware of its own layout."""


def cases() -> list[tuple[tuple[Path, ...], int, str]]:
    """(files, nodes, hardware) of recipes alone and with each of their layouts, named recipe_NODESx8xMEMORY."""
    found = [((CONFIGS / f"{name}.yaml",), *where) for name, where in RECIPES.items()]
    for layout in sorted((CONFIGS / "layouts").glob("*.yaml")):
        name, _, size = layout.stem.rpartition("_")
        nodes, memory = size.split("x", 1)
        found.append(((CONFIGS / f"{name}.yaml", layout), int(nodes), memory))
    return found


@pytest.mark.parametrize(
    ("files", "nodes", "hardware"), cases(), ids=lambda value: getattr(value, "stem", None)
)
def test_recipe_fits_its_hardware(files: tuple[Path, ...], nodes: int, hardware: str) -> None:
    config = load(files)
    tree = plan_report(config, load_hardware(hardware)).json()
    assert tree["errors"] == []
    assert tree["fits"]
    assert tree["nodes"] == nodes
    assert tree["world_size"] == 8 * nodes
    assert tree["rollout"]["longest_sequences"] >= 8


@pytest.mark.parametrize(("files", "nodes", "hardware"), cases())
def test_recipe_passes_a_dry_run(
    files: tuple[Path, ...], nodes: int, hardware: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", *map(str, files), "--dry-run"]) == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(capsys.readouterr().out)
    assert dump(load([resolved])) == resolved.read_text()


def test_both_memory_sizes_and_all_scales_are_there() -> None:
    sizes = {(nodes, hardware) for _, nodes, hardware in cases()}
    assert {hardware for _, hardware in sizes} == {"8x80gb", "8x141gb"}
    assert {1, 16} <= {nodes for nodes, _ in sizes}
    assert max(nodes for nodes, _ in sizes) >= 32


def test_the_largest_plan_is_quick() -> None:
    start = time.monotonic()
    report = plan_report(load([CONFIGS / "deepseek_v3.yaml"]), load_hardware("8x80gb"))
    assert report.tree["world_size"] == 512
    assert time.monotonic() - start < 30
