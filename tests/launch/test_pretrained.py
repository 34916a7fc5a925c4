"""A pretrained model with its own chat template (SmolLM2-135M-Instruct, from the package index) through all
that a user does with one: algorithms, tuning, a tool, export, evaluation.

The nightly suite runs it. In the merge, tests/launch runs the same commands with tiny random models, and
tests/mrl/prepare/test_convert_model.py converts a small GGUF file.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.launch.command import run
from tests.support.once import once

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MODEL = Path("work/smollm2")
ONE_RANK = ("training.layout={ep: 1, dp: 1}", "launch.slots_per_node=1")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with dense/, moe/, train.jsonl and validation.jsonl, as `make smollm2` makes them."""

    def make(folder: Path) -> None:
        subprocess.run(["make", "-s", f"{MODEL}/moe/config.json"], cwd=ROOT, check=True, timeout=900)
        for name in ("dense", "moe"):
            shutil.copytree(ROOT / MODEL / name, folder / name)
        run("make", "problems", "--out", str(folder), log=folder / "problems.log")

    return once(tmp_path_factory, "smollm2", make)


def words(smollm2: Path, folder: Path, *extra: str, model: str = "dense") -> list[str]:
    """Return arguments of a run of two steps, four prompts and four samples each, in float32."""
    return [
        str(ROOT / "configs/smollm2.yaml"),
        f"run={{name: run, folder: {folder}}}",
        f"model.path={smollm2}/{model}",
        f"data.train={smollm2}/train.jsonl",
        f"data.validation={smollm2}/validation.jsonl",
        "training.dtype=float32",
        "rollout.dtype=float32",
        "training.optimizer={lr: 1e-5, warmup_steps: 0}",
        "loop={steps: 2, prompts_per_step: 4, samples_per_prompt: 4, max_rollout_mismatch: 1e-3}",
        "loop.validation={every_steps: 0, before_training: false, num_prompts: 16}",
        "loop.checkpoint={every_steps: 0}",
        "algorithm={filter: null, distillation: null}",
        *extra,
    ]


def trained(folder: Path) -> list[dict[str, float]]:
    """Return the metric rows of the two steps, after checking that they are finite."""
    rows = [row for row in read(folder / "run/metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
        assert row["optim/grad_norm"] >= 0
    return rows


DENSE = ("training.lora=null", *ONE_RANK)
FORMS = {
    "whole": DENSE,
    "adapters": ("training.lora.targets=[attention, mlp]", *ONE_RANK),
    "dapo": (*DENSE, "algorithm={loss: {name: ppo_clip, clip_low: 0.2, clip_high: 0.28}, minibatches: 2}"),
    "ppo": (*DENSE, "critic={}", "algorithm={estimator: {name: gae}}"),
    "stream": (
        *DENSE,
        "loop.schedule=stream",
        "stream.max_staleness=1",
        "launch={engine_slots: 1, slots_per_node: 2}",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_algorithm_trains_it(form: str, smollm2: Path, tmp_path: Path) -> None:
    run("train", *words(smollm2, tmp_path, *FORMS[form]), log=tmp_path / "log", seconds=900)
    rows = trained(tmp_path)
    diffs = [row[name] for row in rows if (name := "policy/rollout_logprob_diff_max") in row]
    assert diffs and max(diffs) < 1e-3


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_dense_model_teaches_its_mixture(noise: float, smollm2: Path, tmp_path: Path) -> None:
    """Without noise both compute the same function, so their divergence is 0."""
    policy, teachers = tmp_path / "moe", f"{{problems: {smollm2}/dense}}"
    options = ("--experts", "4", "--per-token", "2", "--noise", str(noise))
    run("convert", f"{smollm2}/dense", "--out", str(policy), *options, log=tmp_path / "convert", seconds=300)
    taught = (
        f"model.path={policy}",
        f"algorithm.distillation={{teachers: {teachers}, teachers_only: true}}",
        "training.optimizer.lr=1e-3",
        "loop.steps=4",
    )
    run("train", *words(smollm2, tmp_path, *taught), log=tmp_path / "log", seconds=900)
    rows = [row for row in read(tmp_path / "run/metrics.jsonl") if row["step"]]
    divergences = [row["distillation/divergence"] for row in rows]
    assert len(rows) == 4 and all(row["distillation/taught_frac"] == 1 for row in rows)
    if noise:
        assert 0.01 < divergences[-1] < divergences[0]
    else:
        assert abs(divergences[0]) < 1e-6


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_it_is_tuned_on_rows(objective: str, smollm2: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (smollm2 / "train.jsonl").read_text().splitlines()[:32]]
    answers = {
        "sft": lambda right: {"response": right},
        "dpo": lambda right: {"chosen": right, "rejected": "1000"},
    }
    made = [{"prompt": row["prompt"], **answers[objective](row["answer"])} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    tune = f"tune={{objective: {{name: {objective}}}, data: {{train: {tmp_path}/rows.jsonl}}, steps: 6, "
    tune += f"batch_rows: 16, output: {tmp_path}/tuned, optimizer: {{lr: 1e-5}}}}"
    run("tune", *words(smollm2, tmp_path, *DENSE, tune), log=tmp_path / "log", seconds=900)
    losses = [row["tune/loss"] for row in read(tmp_path / "run/tune/metrics.jsonl") if "tune/loss" in row]
    assert losses[-1] < losses[0]
    assert (tmp_path / "tuned/config.json").is_file()


def test_it_calls_a_tool(smollm2: Path, tmp_path: Path) -> None:
    """Its own template shows no tools: the system message does."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*7"}], "expression": f"{a}*7"} for a in range(11, 43)
    ]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    extra = (
        *DENSE,
        *(f"data.{name}={tmp_path}/{name}.jsonl" for name in ("train", "validation")),
        "data.max_prompt_tokens=400",
        "agent={environment: calculator, show_tools: system, max_turns: 2, max_turn_tokens: 48}",
        "reward={kind: environment, workers: 1}",
        "rollout={max_response_tokens: 160, max_num_seqs: 16, kv_cache_bytes: 268435456}",
    )
    run("train", *words(smollm2, tmp_path, *extra), log=tmp_path / "log", seconds=900)
    trained(tmp_path)
    shown = (tmp_path / "run/samples.jsonl").read_text()
    assert "calculator" in shown


def test_its_export_is_the_model_that_was_validated(smollm2: Path, tmp_path: Path) -> None:
    """`mrl eval` with vLLM repeats the run's last validation; transformers repeats a response of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra = ("export.every_steps=2", "loop.checkpoint={every_steps: 2}")
    run("train", *words(smollm2, tmp_path, *DENSE, *extra), log=tmp_path / "log", seconds=900)
    (folder,) = (tmp_path / "run/exports").iterdir()
    last = [row for row in read(tmp_path / "run/metrics.jsonl") if "val/accuracy" in row][-1]
    words_of_eval = [f"model.path={folder}", "--out", str(tmp_path / "results")]
    run("eval", *words(smollm2, tmp_path, *DENSE), *words_of_eval, log=tmp_path / "eval", seconds=900)
    summary = json.loads((tmp_path / "results/summary.json").read_text())
    assert summary["metrics"]["val/accuracy"] == last["val/accuracy"]
    row = json.loads((tmp_path / "results/samples.jsonl").read_text().splitlines()[0])
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    tokens = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
    made = model.generate(tokens, max_new_tokens=row["response_tokens"], do_sample=False)[
        0, tokens.shape[1] :
    ]
    assert tokenizer.decode(made, skip_special_tokens=True) == row["response"]
