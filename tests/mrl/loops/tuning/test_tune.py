"""The loop of `mrl tune` on a real rank: a resumed run gives equal weights; the reference is checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.capacity.auto_settings import resolve_auto
from mrl.config.load import load
from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.data.conversation import Encoder
from mrl.data.tune_rows import load_training, load_validation_rows, reward_model_rows
from mrl.launch.commands.tune import worker_changes
from mrl.loops.tuning.tuner import Tuner
from mrl.observe.metric_names import undescribed
from mrl.observe.metrics_log import read, without_volatile
from mrl.prepare import arithmetic_rows, new_model
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.worker import MegatronWorker
from tests.ranks import run_ranks

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = arithmetic_rows.write_arithmetic(
        tmp_path_factory.mktemp("task"), largest=9, num_validation=16, num_sft=8
    )
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    model = ModelSection(path=str(folder / "model"), new=new, max_length=16)
    new_model.ensure_model(model, [str(folder / "pairs.jsonl")], seed=0)
    return folder


def words(task: Path, objective: str) -> list[str]:
    """Validate the training rows too, to show what they teach."""
    tune = (
        f"tune={{objective: {objective}, output: out, epochs: 3, batch_rows: 24, "
        f"optimizer: {{lr: 1e-3}}, validate_every: 2, "
        f"data: {{train: {task}/pairs.jsonl, validation: {task}/pairs.jsonl}}}}"
    )
    layout = "training.layout={ep: 1, dp: 1}"
    return [f"model={{path: {task}/model, max_length: 16}}", layout, tune]


def tuned(
    rank: int, world: int, port: int, settings: list[str], folder: str, stop_after: int | None
) -> dict[str, Any]:
    """Run or resume a tuning, stopped before step `stop_after` + 1; return the export's digest."""
    config = load([ROOT / "configs/quickstart.yaml"], settings)
    config = resolve_auto(config, gpus=False, memory_bytes=8 << 30)
    section = config.tune
    assert section is not None
    worker = MegatronWorker(
        **{"model": config.model} | worker_changes(config, section),
        training=config.training.model_copy(update={"optimizer": section.optimizer}),
        rank=rank,
        world_size=world,
        store=f"tcp://127.0.0.1:{port}",
    )
    tokenizer = load_tokenizer(config.model.path)
    encoder = Encoder(tokenizer, ends=[tokenizer.eos_token_id])
    rows = [part(section, encoder, max_length=16) for part in (load_training, load_validation_rows)]
    if section.objective.is_reward_model:
        rows = [reward_model_rows(part) for part in rows]
    lines: list[str] = []
    tuner = Tuner(config, section, worker, *rows, folder=Path(folder), tell=lines.append)
    calls = iter(range(1000))
    finished = tuner.run(lambda: stop_after is not None and next(calls) >= stop_after)
    digest = hashlib.sha256()
    for _, tensor, _, _ in worker.policy.local_tensors():
        digest.update(tensor.contiguous().numpy().tobytes())
    report = tuner.score_report() if finished else {}
    return {
        "finished": finished,
        "digest": digest.hexdigest(),
        "lines": lines,
        "steps": tuner.num_steps,
        "report": report,
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [without_volatile(row) for row in read(folder / "metrics.jsonl")]
    assert undescribed({name for row in rows for name in row}) == []
    return rows


def whole_and_in_parts(settings: list[str], folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a tuning and its rows; check that one stopped after step 3 and resumed equals it."""
    (whole,) = run_ranks(tuned, 1, settings, str(folder / "whole"), None)
    (part,) = run_ranks(tuned, 1, settings, str(folder / "parts"), 3)
    assert whole["finished"] and not part["finished"] and part["lines"][-1] == "step 3: saved"
    (resumed,) = run_ranks(tuned, 1, settings, str(folder / "parts"), None)
    assert resumed | {"lines": whole["lines"]} == whole and part["digest"] != whole["digest"]
    rows = rows_of(folder / "whole")
    assert rows == rows_of(folder / "parts")
    return whole, rows


def test_stopped_and_resumed_it_is_the_same_to_the_bit_and_a_foreign_reference_is_refused(
    task: Path, tmp_path: Path
) -> None:
    settings = words(task, "{name: dpo, beta: 0.3, sft_weight: 0.5}")
    whole, rows = whole_and_in_parts(settings, tmp_path)
    assert [row["step"] for row in rows] == list(range(whole["steps"] + 1))
    first, last = rows[1], rows[-1]
    assert (
        first["preference/pair_loss"] == pytest.approx(np.log(2), abs=1e-4)
        and first["preference/noise"] < 1e-4
    )
    assert last["val/preference/margin_mean"] > rows[0]["val/preference/margin_mean"]
    (kept,) = [
        path
        for path in (tmp_path / "whole/reference").iterdir()
        if path.stat().st_size == 8 * 2 * len((task / "pairs.jsonl").read_text().splitlines())
    ]
    np.fromfile(kept).__add__(0.5).tofile(kept)
    with pytest.raises(AssertionError, match="off what the reference gives now"):
        run_ranks(tuned, 1, settings, str(tmp_path / "whole"), None)


def test_a_reward_model_stopped_and_resumed_is_the_same_to_the_bit(task: Path, tmp_path: Path) -> None:
    settings = words(task, "{name: reward_model, center: {kind: batch_sum, weight: 1e-4}}")
    whole, rows = whole_and_in_parts(settings, tmp_path)
    first, last = rows[0], rows[-1]
    assert first["val/loss"] == rows[1]["preference/pair_loss"] == pytest.approx(np.log(2))  # a head of zeros
    assert last["val/loss"] < first["val/loss"] and last["val/preference/score_std"] > 0
    assert last["val/preference/accuracy_low"] < last["val/preference/accuracy"]
    assert any(line.startswith("held-out accuracy") for line in whole["lines"])
    with pytest.raises(
        AssertionError, match=r"a run with different tune\.objective; choose another run\.name"
    ):
        run_ranks(tuned, 1, words(task, "{name: reward_model}"), str(tmp_path / "parts"), 9)
    with pytest.raises(AssertionError, match=r"a run with different run\.seed; choose another run\.name"):
        run_ranks(tuned, 1, [*settings, "run.seed=77"], str(tmp_path / "parts"), 9)


def test_kto_measures_its_zero_point_over_the_step(task: Path, tmp_path: Path) -> None:
    (result,) = run_ranks(tuned, 1, words(task, "{name: kto, beta: 0.5}"), str(tmp_path / "kto"), None)
    rows = rows_of(tmp_path / "kto")
    assert result["finished"] and rows[1]["preference/pair_loss"] == pytest.approx(0.5, abs=1e-4)
    assert rows[1]["preference/kto_z"] < 1e-5 and all(row["preference/kto_z"] >= 0 for row in rows[1:])
    assert rows[-1]["preference/pair_loss"] < 0.5
    assert rows[-1]["val/preference/accuracy"] > rows[0].get("val/preference/accuracy", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{name: sft, average: sequences}", "{name: orpo}"])
def test_objectives_without_a_reference_keep_none(name: str, task: Path, tmp_path: Path) -> None:
    settings = words(task, name)
    if "sft" in name:
        settings[-1] = settings[-1].replace("pairs.jsonl", "sft.jsonl")
    (result,) = run_ranks(tuned, 1, settings, str(tmp_path / "run"), None)
    rows = rows_of(tmp_path / "run")
    assert result["finished"] and rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert not (tmp_path / "run/reference").exists()
