"""Every shipped recipe learns the quickstart's task: long runs, about five minutes each on two free cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.launch.command import run
from tests.launch.tiny_runs import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2400)]

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
RECIPES = {
    "grpo": [QUICKSTART, "configs/algorithm/grpo.yaml"],
    "dapo": ["configs/quickstart_dapo.yaml"],
    "dr_grpo": [QUICKSTART, "configs/algorithm/dr_grpo.yaml", "algorithm.aggregation.length=6"],
    "rloo": [QUICKSTART, "configs/algorithm/rloo.yaml"],
    "reinforce_pp_baseline": [QUICKSTART, "configs/algorithm/reinforce_pp_baseline.yaml"],
    "gspo": [QUICKSTART, "configs/algorithm/gspo.yaml", "training.optimizer.decay_steps=1200"],
    "ppo": ["configs/quickstart_ppo.yaml"],
}
STEPS = 220


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, tokenizer and the warm-started model, as `make quickstart` makes them."""
    folder = tmp_path_factory.mktemp("recipes")
    run("make", "arithmetic", "--out", str(folder), log=folder / "make.log")
    more = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"warm_start={{data: {folder}/warm_start.jsonl, output: {folder}/warm}}",
    ]
    words = [QUICKSTART, str(ROOT / "configs/quickstart_model.yaml"), *more]
    run("warm-start", *words, log=folder / "warm.log", seconds=600)
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_reaches_0_85(recipe: str, warm: Path) -> None:
    more = [
        f"run={{name: {recipe}, folder: {warm}/runs}}",
        f"model.path={warm}/warm",
        f"data={{train: {warm}/train.jsonl, validation: {warm}/validation.jsonl}}",
        f"loop.steps={STEPS}",
        "loop.checkpoint={every_steps: 0, at_end: false}",
    ]
    run("train", *RECIPES[recipe], *more, log=warm / f"{recipe}.log", seconds=2000)
    rows = read(warm / "runs" / recipe / "metrics.jsonl")
    curve = {row["step"]: row["val/accuracy"] for row in rows if "val/accuracy" in row}
    assert curve[0] <= 0.5 and max(curve.values()) >= 0.85, curve
