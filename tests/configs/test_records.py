"""Published records in docs/recipes.md: the plan's figures, and its range around what was measured."""

import re
from pathlib import Path

import pytest

from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware, with_mean_response
from mrl.config.load import load
from mrl.files import CONFIGS
from tests.support.recipes import files_of

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ROW = re.compile(
    r"\| `configs/records/(?P<name>\w+)_(?P<nodes>\d+)x8x80gb\.yaml` \| (?P<gpus>\d+) \| (?P<length>[\d,]+) "
    r"\| (?P<published>\d+); [\d,.]+ \| (?P<plan>[^|;]+); (?P<rate>[\d,]+) \| (?P<engines>[^|]+) \|"
)
ROWS = [match.groupdict() for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def estimate(row: dict[str, str], *words: str) -> Estimate:
    """Return the plan of a row's files for samples of its mean length."""
    record = CONFIGS / "records" / f"{row['name']}_{row['nodes']}x8x80gb.yaml"
    config = load([*files_of(row["name"]), record], words)
    response = int(row["length"].replace(",", "")) - config.data.max_prompt_tokens / 2
    hardware = with_mean_response(load_hardware("8x80gb"), response, config.rollout.max_response_tokens)
    assert f"--mean-response {response:.0f}\n" in record.read_text(encoding="utf-8")
    return Estimate(config, hardware)


def shown(plan: Estimate) -> str:
    low, high = (sum(ends) for ends in zip(*plan.seconds_range.values(), strict=True))
    return f"{sum(plan.seconds.values()):.0f} ({low:.0f} to {high:.0f})"


def test_every_record_has_a_row() -> None:
    files = {path.stem for path in (CONFIGS / "records").glob("*.yaml")}
    assert files == {f"{row['name']}_{row['nodes']}x8x80gb" for row in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_record_is_within_the_range_of_its_plan(row: dict[str, str]) -> None:
    plan = estimate(row)
    assert plan.unmet == [] and plan.config.num_slots == int(row["gpus"]) == 8 * int(row["nodes"])
    low, high = (sum(ends) for ends in zip(*plan.seconds_range.values(), strict=True))
    assert low < float(row["published"]) < high
    assert row["plan"] == shown(plan)
    rate = plan.work.tokens / sum(plan.seconds.values()) / plan.config.num_slots
    assert row["rate"] == f"{rate:,.0f}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_recipes_engines_have_their_own_plan(row: dict[str, str]) -> None:
    base = load(files_of(row["name"])).rollout
    words = (f"rollout.dp={base.dp}", f"rollout.tp={base.tp}", f"rollout.quantization={base.quantization}")
    same = estimate(row).config == (recipes := estimate(row, *words)).config
    assert row["engines"] == ("the same engines" if same else shown(recipes))
