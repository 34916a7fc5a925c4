"""A setting that names something missing ends `mrl train` and its dry run at once, with one line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.cli import main
from mrl.config.load import load, load_config, split_arguments
from mrl.errors import ConfigError, MrlError
from mrl.launch.commands.check import dry_run
from mrl.launch.commands.train import Run
from tests.launch.tiny_runs import words


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def rewrite_weights(folder: Path, changes: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | changes(weights), path, {"format": "pt"})


def shrink_vocabulary(folder: Path, size: int) -> None:
    rewrite(folder, vocab_size=size)
    tokens = ("model.embed_tokens.weight", "lm_head.weight")
    rewrite_weights(folder, lambda values: {name: values[name][:size] for name in tokens if name in values})


def quantise_without_scales(folder: Path, name: str) -> None:
    rewrite_weights(folder, lambda weights: {name: weights[name].to(torch.float8_e4m3fn)})


def code_for_tokenizer(folder: Path) -> None:
    """Give the tokenizer code, as Kimi-K2's folder has; executing that code ends the process."""
    drop(folder, "tokenizer.json")
    (folder / "own.py").write_text("import os\nos._exit(7)\n")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def without_end(folder: Path) -> None:
    """Remove the end of text from tokenizer and model."""
    rewrite(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))


MODEL_FAULTS = {
    "a family that cannot be trained": (lambda folder: rewrite(folder, model_type="nemotron_h"),
        "model_type 'nemotron_h' in config.json is not supported"),
    "a model in four bits": (lambda folder: rewrite(folder, quantization_config={"quant_method": "awq"}),
        "quantization_config = {'quant_method': 'awq'}"),
    "no tokenizer": (lambda folder: drop(folder, "tokenizer.json", "tokenizer_config.json"),
        "has no tokenizer that transformers can load"),
    "a tokenizer that is code": (lambda folder: code_for_tokenizer(folder),
        "Python code of the folder, own.py: read it, then set model.trust_remote_code=true"),
    "a tokenizer of another model": (lambda folder: shrink_vocabulary(folder, 8),
        "they do not match"),
    "a stop token that is none": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": ["<end>"]}'),
        "generation_config.json: eos_token_id must be a token id",
    ),
    "no end of text": (lambda folder: without_end(folder),
        "(eos_token_id) have no end-of-text token"),
    "no weights": (lambda folder: drop(folder, "model.safetensors"), "has neither model.safetensors nor"),
    "a layer without weights": (lambda folder: rewrite(folder, num_hidden_layers=5), "lacks"),
    "float8 values without scales": (
        lambda folder: quantise_without_scales(folder, "model.layers.1.self_attn.o_proj.weight"),
        "is F8_E4M3, but the folder lacks model.layers.1.self_attn.o_proj.weight_scale_inv; "
        "download both again",
    ),
    "weights of another width": (lambda folder: rewrite(folder, moe_intermediate_size=96),
        "config.json says [96, "),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "widths without a kernel": (lambda folder: rewrite(folder, head_dim=48), "head_dim = 48"),
}  # fmt: skip

WORD_FAULTS = [
    (("logging.trackers=[wandb]",), "logging.trackers names wandb, which is not installed"),
    (("algorithm.loss={name: custom, function: 'nowhere.module:loss'}",),
     "nowhere.module cannot be imported"),
    (("algorithm.loss={name: custom, function: 'tests.support.own_losses:misspelt'}",),
     "a trial on made-up numbers before the start failed: it raised"),
    (("algorithm.estimator={name: custom, function: 'tests.support.own_losses:groups_only'}",),
     "it returned [2], not a tensor of 4 samples or 8 tokens"),
    (("reward={kind: plugin, path: 'FOLDER/broken.py:score'}",), "SyntaxError"),
    (("reward={kind: plugin, path: 'FOLDER/leaves.py:score'}",), "ended the process with status 7"),
    (("data.train=/nowhere/rows.jsonl",), "/nowhere/rows.jsonl: no such file"),
    (("data.train=FOLDER/bad.jsonl",), "bad.jsonl:2"),
    (("model.path=/nowhere/model",), "model.path = /nowhere/model does not exist"),
    (("model.reference_path=/nowhere/model", "algorithm.kl={location: loss, coefficient: 0.1}"),
     "/nowhere/model"),
    (("training.layout={tp: 3, ep: 1, dp: 1}",),
     "attention heads (2) are not divisible by training.layout.tp = 3"),
    (("training.layout={dp: 4, ep: 1}", "rollout.tp=4"),
     "attention heads (2) are not divisible by rollout.tp = 4"),
    (
        (
            "training.layout={dp: 4, ep: 1}",
            "rollout={dp: 2, tp: 2, expert_parallel: true, max_response_tokens: 8}",
            "launch.slots_per_node=3",
        ),
        "engine 0, dp rank 1 would be on 2 nodes and dp rank 0 on 1",
    ),
    (("rollout.stop_token_ids=[3,100000]",),
     "rollout.stop_token_ids: [100000] are not tokens of the model, which are 0 to"),
    (("rollout.stop=['.<end>']",), "rollout.stop: '.<end>' contains the special token '<end>'"),
    (("model.max_length=4096",), "exceeds the model's 32 positions"),
    (("reward={kind: llm, path: null, engine: j, engines: {j: {model: /nowhere/judge}}}",),
     "reward.engines.j: /nowhere/judge/config.json does not exist"),
    (("reward={kind: llm, path: null, engine: j, engines: {j: {model: TASK/model}}}",),
     "model has no chat template; set one"),
    (("reward={kind: llm, path: null, engine: j, engines: {j: {model: TASK/model, max_length: 33}}}",),
     "reward.engines.j: max_length = 33 exceeds the 32 positions of "),
    (("reward={kind: reward_model, path: null, engine: j, engines: {j: {model: TASK/model}}}",),
     "is Qwen3MoeForCausalLM, not a ...ForSequenceClassification"),
]  # fmt: skip
"""Settings and the expected message; FOLDER has the files below, TASK the rows and a model."""

FILES = {
    "broken.py": "def score(:\n",
    "leaves.py": "import os\nos._exit(7)\n",
    "bad.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=\n',
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def children() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def workers(processes: set[psutil.Process]) -> list[str]:
    """Return command lines of the processes that are workers of a run."""
    lines = [" ".join(process.cmdline()) for process in processes]
    return [line for line in lines if "ray" in line or "vllm" in line or "torchrun" in line]


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the error lines of a command that refused its input and started nothing."""
    others = children()
    assert main(command) == 2
    assert not workers(children() - others)
    out, err = capsys.readouterr()
    assert out == "", "errors stand alone"
    return err.strip().splitlines()


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)


@pytest.mark.parametrize(("settings", "message"), WORD_FAULTS)
def test_a_word_that_names_nothing_ends_the_dry_run(settings, message, task, files, tmp_path, capsys) -> None:
    resolved = [word.replace("FOLDER", str(files)).replace("TASK", str(task)) for word in settings]
    lines = refused(["train", *words(task, tmp_path, "run", *resolved), "--dry-run"], capsys)
    assert message in "\n".join(lines), lines
    assert lines[0].startswith("mrl: ") and len(lines) <= 3, lines


def test_an_engine_of_another_kind_of_reward_model_ends_the_dry_run(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scores"
    shutil.copytree(task / "model", folder)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    names = {str(number): f"head {number}" for number in range(3)}
    rewrite(folder, architectures=["Qwen3MoeForSequenceClassification"], pad_token_id=end + 1, id2label=names)
    engine = f"engine: j, engines: {{j: {{model: {folder}}}}}"
    word = f"reward={{kind: reward_model, path: null, {engine}}}"
    lines = refused(["train", *words(task, tmp_path, "run", word), "--dry-run"], capsys)
    assert len(lines) == 1 and "reward.engines.j: " in lines[0] and "gives 3 numbers" in lines[0], lines


def test_heads_of_a_reward_model_are_no_critic(task, tmp_path, capsys) -> None:
    folder = shutil.copytree(task / "model", tmp_path / "scores")
    names = {str(number): f"score_{number}" for number in range(3)}
    rewrite(folder, architectures=["Qwen3MoeForSequenceClassification"], id2label=names)
    settings = ("algorithm.estimator={name: gae}", f"critic={{path: {folder}}}")
    lines = refused(["train", *words(task, tmp_path, "run", *settings), "--dry-run"], capsys)
    assert len(lines) == 1 and lines[0].startswith(f"mrl: critic.path = {folder} gives 3 numbers")


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_model_that_cannot_be_trained_ends_the_dry_run(fault, task, tmp_path, capsys) -> None:
    change, message = MODEL_FAULTS[fault]
    folder = shutil.copytree(task / "model", tmp_path / "model")
    change(folder)
    command = [
        "train",
        *words(task, tmp_path, "run", f"model={{path: {folder}, max_length: 16}}"),
        "--dry-run",
    ]
    lines = refused(command, capsys)
    assert len(lines) == 1 and message in lines[0], lines


def test_a_run_says_all_its_faults_at_once_and_starts_nothing(task, tmp_path, capsys) -> None:
    bad = (
        "logging.trackers=[wandb]", "reward={kind: plugin, path: 'nowhere:score'}",
        "data.train=/nowhere.jsonl",
    )  # fmt: skip
    lines = refused(["train", *words(task, tmp_path, "run", *bad, "training.layout={dp: 3, ep: 3}")], capsys)
    assert lines[0] == "mrl: 4 faults, nothing was started:"
    for line, message in zip(
        lines[1:], ("wandb", "nowhere", "/nowhere.jsonl", "training.layout.ep = 3"), strict=True
    ):
        assert line.startswith("  - ") and message in line
    assert not [*(tmp_path / "run/logs").rglob("*.log")], "a worker had started"


def test_a_good_run_passes_and_its_dry_run_leaves_nothing(task: Path, tmp_path: Path) -> None:
    new = (
        "model={path: %s/new, max_length: 32, "
        "new: {hidden_size: 64, num_heads: 2, head_dim: 32, expert_size: 64}}"
    )
    files, settings = split_arguments(words(task, tmp_path, "run", new % tmp_path))
    dry_run(load(files, settings))
    assert not list(tmp_path.iterdir())


def test_what_a_run_is_probably_not_meant_to_do_is_said_in_a_line_each(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings follow the order of settings and rows, after the configuration; no others appear."""
    odd = [
        f"data.validation={task}/train.jsonl",
        "loop.prompts_per_step=100000",
        "algorithm.minibatches=200000",
    ]
    odd += ["algorithm.shaping.overlong={max_tokens: 7, buffer_tokens: 2}", "rollout.max_response_tokens=6"]
    for settings, expected in (
        ([], []),
        (
            odd,
            [
                "overlong.max_tokens = 7",
                "minibatches = 200000",
                "prompts_per_step = 100000",
                "data.validation: all 8",
            ],
        ),
    ):
        caplog.clear()
        assert main(["train", *words(task, tmp_path, "run", *settings), "--dry-run"]) == 0
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(lines) == len(expected), lines
        assert all(message in line for message, line in zip(expected, lines, strict=True)), lines
        assert "prompts_per_step:" in capsys.readouterr().out


def test_a_layout_of_more_gpus_than_the_machine_has_is_refused_before_ray(monkeypatch) -> None:
    from mrl.config.sections.launch import LaunchSection
    from mrl.launch.cluster import cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "own_gpus", lambda: 8)
    with (
        pytest.raises(ConfigError, match="the layout needs 16 GPUs and this machine has 8"),
        cluster.cluster(LaunchSection(), num_slots=16),
    ):
        pass


def test_a_pair_loss_with_a_mistake_inside_ends_a_tuning_before_its_ranks(task, tmp_path, capsys) -> None:
    objective = "{name: custom, function: 'tests.support.own_losses:misspelt_of_pairs'}"
    tune = f"tune={{data: {{train: {task}/pairs.jsonl}}, output: {tmp_path}/out, objective: {objective}}}"
    (line,) = refused(["tune", *words(task, tmp_path, "run", tune)], capsys)
    assert "tune.objective.function" in line and "has no attribute 'logprobs'" in line


def test_a_tuning_says_at_its_start_what_the_chat_template_leaves_out(
    acting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, answer]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("mrl.launch.commands.tune.run_local_ranks", lambda *a, **kw: 0)
    tune = f"tune={{data: {{train: {tmp_path}/rows.jsonl}}, output: {tmp_path}/out, batch_rows: 1}}"
    arguments = [*words(acting, tmp_path, "run", tune), "model.max_length=64", "data.max_prompt_tokens=32"]
    assert main(["tune", *arguments]) == 0
    warning = "the chat template does not use assistant.reasoning_content, so the model never reads it"
    assert f"tune: {warning}" in capsys.readouterr().out.splitlines()
    assert main(["data", *arguments]) == 0
    assert f"data: tune.data: {warning}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("taken", ["", "lock", "config.yaml", "logs"])
def test_a_run_folder_that_takes_nothing_is_found_before_anything_starts(taken, task, tmp_path) -> None:
    """Put a file where a folder belongs, or a folder where a file belongs, which blocks root too."""
    config = load_config(*words(task, tmp_path / "runs", "run"))
    place = Path(config.run_folder, taken)
    place.parent.mkdir(parents=True)
    place.touch() if taken in ("", "logs") else place.mkdir()
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises((OSError, MrlError), match=re.escape(str(place))):
        next(iter(Run(config)))
    assert {child.pid for child in psutil.Process().children()} <= before
