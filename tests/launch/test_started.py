"""A restart resumes with the same model, rows and seed, or is refused before anything starts."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.capacity.auto_settings import resolve_auto
from mrl.config.load import dump, load
from mrl.config.root import Config
from mrl.data.identity import prompt_id
from mrl.data.load_rows import Dataset, load_data
from mrl.errors import ConfigError, DataError
from mrl.launch.commands import earlier_start
from mrl.launch.commands.check import check_resume
from mrl.launch.commands.train import Run
from mrl.loops.resume_check import kept_settings
from mrl.observe.metrics_log import MetricsLog
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.checkpoint import checkpoint_folder as checkpoints
from mrl.training.checkpoint import plain_values
from mrl.training.hf import base
from tests.golden_run import ROOT, write_golden_model
from tests.mrl.data.conftest import make_tokenizer
from tests.mrl.training.make_golden import SHAPE
from tests.tiny_models import write_model

DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
DAYS = (datetime.date(2025, 1, 31), datetime.date(2026, 2, 1))


def config_of(folder: Path, *words: str) -> Config:
    """Return the configuration of a run `run` of three steps in the folder, with the model in `model`."""
    settings = [f"run={{name: run, folder: {folder}}}", f"model.path={folder}/model", "loop.steps=3"]
    settings += ["training.layout={dp: 1, ep: 1}", f"data.train={folder}/train.jsonl", "data.validation=null"]
    config = load([ROOT / "configs/quickstart.yaml"], [*settings, *words])
    return resolve_auto(config, gpus=False, memory_bytes=8 << 30)


def save(config: Config, *, step: int, stream: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint as ranks do, as far as checks before the start of ranks read it."""
    path = Path(config.run_folder) / "checkpoints" / checkpoints.name_of(step)
    path.mkdir(parents=True)
    state = {
        "next_step": step + 1,
        "supply": {"stream": stream} if stream else {},
        "settings": kept_settings(config),
    }
    (path / checkpoints.EXTRA_FILE).write_bytes(plain_values.dumps({"user": state}))
    digest = base.combined_digest(base.file_digests(config.model.path))
    about = base.run_identity(config.model, config.training, digest)
    files = checkpoints.digests(path, [checkpoints.EXTRA_FILE])
    manifest = {"version": checkpoints.VERSION, "about": about, "files": files}
    (path / checkpoints.MANIFEST).write_text(json.dumps(manifest))
    return path


@pytest.fixture(scope="module")
def golden_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def run(golden_model: Path, tmp_path: Path) -> Config:
    shutil.copytree(golden_model, tmp_path / "model")
    config = config_of(tmp_path)
    save(config, step=1)
    return config


def moved(model: Path) -> Path:
    return Path(shutil.copytree(model, model.parent / "elsewhere" / "the model"))


def of_another_seed(model: Path) -> Path:
    return write_model(model.parent / "other", seed=2, **SHAPE)


def with_one_bit_flipped(model: Path) -> Path:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    return model


def with_another_config(model: Path) -> Path:
    """Change the config only, which changes the meaning of the weights."""
    other = moved(model)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    return other


def with_harmless_changes(model: Path) -> Path:
    other = moved(model)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"transformers_version": "9", "use_cache": False}))
    return other


def of_another_family(model: Path) -> Path:
    return write_model(model.parent / "other", "qwen3", num_hidden_layers=1)


@pytest.mark.parametrize("same", [moved, with_harmless_changes])
def test_the_same_model_goes_on_wherever_it_lies(same, run, tmp_path) -> None:
    check_resume(run)
    check_resume(config_of(tmp_path, f"model.path={same(tmp_path / 'model')}"))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (of_another_seed, "has other weights"),
        (with_one_bit_flipped, "has other weights"),
        (with_another_config, "has other settings in config.json"),
        (of_another_family, "is a qwen3_moe, but the run trains a qwen3"),
    ],
)
def test_another_model_is_refused(other, reason, run, tmp_path) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_resume(config_of(tmp_path, f"model.path={other(tmp_path / 'model')}"))


def test_another_type_or_adapters_in_place_of_weights_are_refused(run: Config, tmp_path: Path) -> None:
    saved = run.training.dtype
    other = "bfloat16" if saved == "float32" else "float32"
    with pytest.raises(ConfigError, match=f"was trained in {saved}, but training.dtype is {other}"):
        check_resume(config_of(tmp_path, f"training.dtype={other}"))
    with pytest.raises(ConfigError, match=r"contains all weights, but the run trains adapters"):
        check_resume(config_of(tmp_path, "training.lora={rank: 4, alpha: 8}"))
    with pytest.raises(ConfigError, match="contains no critic"):
        check_resume(config_of(tmp_path, "critic={}", "algorithm.estimator.name=gae"))
    with pytest.raises(ConfigError, match=r"loop\.schedule = stream, but .* was saved with on_policy"):
        check_resume(config_of(tmp_path, "loop.schedule=stream"))


def test_the_type_of_auto_is_compared_once_the_slots_are_known(run: Config, tmp_path: Path) -> None:
    """A cluster to join decides it, and its ranks compare it again."""
    words = config_of(tmp_path).model_dump(mode="json")
    words["training"]["dtype"] = "auto"
    config = load([words])
    check_resume(config)
    with pytest.raises(ConfigError, match=r"trained in float32, but training\.dtype is bfloat16"):
        check_resume(resolve_auto(config, gpus=True, memory_bytes=0))


def test_a_refused_start_leaves_the_run_s_configuration_as_it_was(run: Config, tmp_path: Path) -> None:
    """Export and report read it. The refusal needs neither Ray nor workers; no address leads there."""
    make_tokenizer().save_pretrained(str(tmp_path / "model"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run/config.yaml").write_text("model: {path: what it was}\n")
    other = of_another_seed(tmp_path / "model")
    words = (f"model.path={other}", "launch.ray_address=127.0.0.1:1", "data.max_prompt_tokens=10")
    with pytest.raises(ConfigError, match="has other weights"):
        next(iter(Run(config_of(tmp_path, *words))))
    assert (tmp_path / "run/config.yaml").read_text() == "model: {path: what it was}\n"


def test_a_run_that_is_done_says_so_and_starts_nothing(run, tmp_path, capsys) -> None:
    path = save(run, step=3)
    assert not earlier_start.is_done(run), "the row of its last step is still to be written"
    MetricsLog(tmp_path / "run/metrics.jsonl").write(3, {"reward/mean": 1.0})
    with Run(run) as again:
        assert list(again) == []
    assert (again.ended, again.exit_code) == ("done", 0)
    assert f"nothing left to do: all 3 steps of {tmp_path}/run are done" in capsys.readouterr().out
    assert not (tmp_path / "run/logs").exists()
    assert not earlier_start.is_done(config_of(tmp_path, "loop.steps=4"))
    with pytest.raises(ConfigError, match="has other weights"):
        list(Run(config_of(tmp_path, f"model.path={of_another_seed(tmp_path / 'model')}")))
    data = bytearray((path / checkpoints.EXTRA_FILE).read_bytes())
    data[-1] ^= 1
    (path / checkpoints.EXTRA_FILE).write_bytes(data)
    assert not earlier_start.is_done(run), "a damaged checkpoint is taken for the end"


def dataset(
    folder: Path, train: str, *words: str, date: datetime.date = DAYS[0], template: str = DATED
) -> Dataset:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    config = config_of(folder, f"data.train={train}", "data.max_prompt_tokens=200", *words)
    return load_data(config.data, config.reward, load_tokenizer(str(folder / "tokenizer"), date=date))


def rows_in(path: Path, *, last: str = "2", tools: bool = False) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": f"{n}+1"}], "answer": str(n + 1)} for n in range(2)
    ]
    rows[-1]["answer"] = last
    if tools:
        rows[0]["tools"] = [{"type": "function", "function": {"name": "add"}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_day_and_the_path_are_no_part_of_what_rows_are(tmp_path: Path) -> None:
    """A template with today's date on two days, and equal bytes under another path or spelling."""
    train = rows_in(tmp_path / "train.jsonl")
    first = dataset(tmp_path, train)
    state, ids = first.stream(7).state(), [prompt_id(row) for row in first.train[0].rows]
    copy = rows_in(tmp_path / "moved" / "rows.jsonl")
    spelt = str(tmp_path / "moved" / ".." / "train.jsonl")
    for path, date in ((train, DAYS[1]), (copy, DAYS[0]), (spelt, DAYS[1])):
        again = dataset(tmp_path, path, date=date)
        again.stream(7).restore(state)
        assert [prompt_id(row) for row in again.train[0].rows] == ids
    texts = {dataset(tmp_path, train, date=date).train[0].rows[0].text for date in DAYS}
    assert texts == {"31 Jan 20250+1", "01 Feb 20260+1"}


@pytest.mark.parametrize("change", ["answer", "tools", "template", "arguments", "order", "seed"])
def test_other_rows_are_refused(change: str, tmp_path: Path) -> None:
    state = dataset(tmp_path, rows_in(tmp_path / "train.jsonl")).stream(7).state()
    words = {"arguments": ["data.chat_template_kwargs={m: 1}"], "order": ["data.shuffle=false"]}
    rows = rows_in(tmp_path / "train.jsonl", last="3" if change == "answer" else "2", tools=change == "tools")
    template = DATED + "{{ 1 }}" if change == "template" else DATED
    other = dataset(tmp_path, rows, *words.get(change, []), template=template)
    with pytest.raises(DataError, match="resume with the same data, mix, tokenizer and seed"):
        other.stream(8 if change == "seed" else 7).require(state)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """With another vocabulary in-flight tokens would be other texts."""
    first = dataset(tmp_path, rows_in(tmp_path / "train.jsonl"))
    other = dataclasses.replace(first, vocabulary="another")
    with pytest.raises(DataError, match="resume with the same data, mix, tokenizer and seed"):
        other.stream(7).require(first.stream(7).state())


def test_the_date_of_a_run_is_that_of_its_first_start(run: Config, tmp_path: Path) -> None:
    first = earlier_start.dated_as_begun(run, tmp_path / "run")
    assert first.model.chat_template_date == datetime.date.today()
    for text, expected in (
        ("model: {chat_template_date: '2020-02-29'}", datetime.date(2020, 2, 29)),
        ("model: {chat_template_date: 2020-02-29}", datetime.date(2020, 2, 29)),
        ("model: {chat_template_date: null}", datetime.date.today()),
        ("model: 3", datetime.date.today()),
        ("a: [", datetime.date.today()),
    ):
        (tmp_path / "run/config.yaml").write_text(text)
        assert earlier_start.dated_as_begun(run, tmp_path / "run").model.chat_template_date == expected, text
    dated = config_of(tmp_path, "model.chat_template_date=2021-01-01")
    assert earlier_start.dated_as_begun(dated, tmp_path / "run").model.chat_template_date == datetime.date(
        2021, 1, 1
    )
    assert load([yaml.safe_load(dump(dated))]) == dated
