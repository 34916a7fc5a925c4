"""Commands give settings the values of this machine, and plans and warnings its memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from mrl.capacity.fit import Fit
from mrl.cli import main
from mrl.config.load import load
from mrl.launch.cluster.gpus import Gpus
from mrl.launch.commands import check, this_machine
from mrl.launch.commands.this_machine import hardware_here, memory_fit, with_local_models, with_values
from tests.launch.tiny_runs import words
from tests.support.hub_cache import add_model, use_cache
from tests.tiny_models import write_model

SMALLEST = ["run.name=a", "model.path=weights/Qwen3-30B-A3B", "data.train=rows.jsonl", "reward.kind=maths"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a machine without GPUs that has 8 GiB available."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(this_machine, "own_gpus", lambda: 0)
    monkeypatch.setattr(check, "own_gpus", lambda: 0)
    monkeypatch.setattr(this_machine, "available_memory", lambda: 8 << 30)


def test_a_machine_without_gpus_decides(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lines = with_values(load([], SMALLEST))
    assert (config.training.dtype, config.rollout.kv_cache_bytes) == ("float32", 1 << 30)
    values = "training in float32, engines in float32, eager engines, KV cache of 1 GiB per engine rank"
    assert lines == [f"CPU run: {values}"]
    assert with_values(config) == (config, []), "a line without a choice"
    monkeypatch.setattr(this_machine, "own_gpus", lambda: 8)
    assert with_values(load([], SMALLEST))[0].training.dtype == "bfloat16"


def test_a_command_leaves_the_section_that_it_does_not_read(machine: None) -> None:
    config, lines = with_values(load([], SMALLEST), sections=["training"])
    assert (config.training.dtype, config.rollout.dtype) == ("float32", "auto")
    assert lines == ["CPU run: training in float32"]
    config, lines = with_values(load([], SMALLEST), sections=["rollout"])
    assert (config.training.dtype, config.rollout.dtype) == ("auto", "float32")
    (line,) = lines
    assert line.startswith("CPU run: engines in float32, eager engines, KV cache ")


@pytest.mark.parametrize(
    ("address", "kind", "dtype"), [("", "CPU", "float32"), ("a cluster", "GPU", "bfloat16")]
)
def test_a_dry_run_prints_the_values_and_which_were_auto(
    address: str,
    kind: str,
    dtype: str,
    task: Path,
    tmp_path: Path,
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cluster to join is not asked: as the other checks do, the dry run assumes that it has GPUs."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["train", *words(task, tmp_path, "run", "rollout.dtype=float32"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {kind} run: training in {dtype}, ")
    resolved = yaml.safe_load(printed)
    assert (resolved["training"]["dtype"], resolved["rollout"]["dtype"]) == (dtype, "float32")
    assert load([yaml.safe_load(printed)]).rollout.enforce_eager == (kind == "CPU")


def test_a_plan_without_hardware_is_for_this_machine_if_it_has_no_gpu(
    task: Path,
    tmp_path: Path,
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seconds are left out: nothing is known of its speed. The first lines say both."""
    monkeypatch.setattr(this_machine.os, "sched_getaffinity", lambda pid: {0, 1, 5})
    assert main(["plan", *words(task, tmp_path, "run")]) == 0
    printed = capsys.readouterr().out
    first = printed.splitlines()[:10]
    assert "hardware  this machine, 3 CPU cores, 8 GiB available (--hardware plans for another)" in first
    assert any("fullest: slot in '" in line and "of 4.3 GB" in line for line in first), first
    assert any(line.startswith("step      no seconds: ") for line in first)
    for timed in (" s estimated", "tokens/s", "at full bandwidth", "deadlines", "node, 0 s", "memory, 0 s"):
        assert timed not in printed
    assert main(["plan", *words(task, tmp_path, "run"), "--hardware", "laptop"]) == 0
    printed = capsys.readouterr().out
    assert "hardware  laptop (CPU, 4 slots)" in printed and "at full bandwidth" in printed
    monkeypatch.setattr(this_machine, "own_gpus", lambda: 4)
    assert main(["plan", *words(task, tmp_path, "run")]) == 0
    assert "hardware  8 x 80 GB" in capsys.readouterr().out


def test_slots_of_a_node_share_its_memory(machine: None) -> None:
    config = load([], [*SMALLEST, "training.layout.dp=8"])
    assert hardware_here(config).gpus_per_node == 8
    assert hardware_here(load([config.model_dump()], ["launch.slots_per_node=2"])).memory_bytes == 4 << 30


def test_a_run_that_needs_more_memory_than_there_is_gets_a_warning(
    task: Path,
    tmp_path: Path,
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert main(["train", *words(task, tmp_path, "run"), "--dry-run"]) == 0
    assert "memory" not in caplog.text
    monkeypatch.setattr(this_machine, "available_memory", lambda: 1 << 30)
    assert main(["train", *words(task, tmp_path, "run"), "--dry-run"]) == 0
    assert "probably needs" in caplog.text and "available memory is 0.5 GiB; " in caplog.text
    assert "end other programs" in caplog.text
    monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    caplog.clear()
    assert main(["train", *words(task, tmp_path, "run"), "--dry-run"]) == 0
    assert "memory" not in caplog.text, "the nodes of a cluster are not this machine"


def test_a_run_that_cannot_fit_is_refused_before_anything_starts(
    task: Path,
    tmp_path: Path,
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(this_machine, "available_memory", lambda: 64 << 20)
    assert main(["train", *words(task, tmp_path, "run", "rollout.kv_cache_bytes=256000000")]) == 2
    printed = capsys.readouterr()
    assert "a slot needs at least 0.3 GiB in 'generate' (KV cache 0.2 GiB" in printed.err
    assert "a lower rollout.kv_cache_bytes" in printed.err and "starting Ray" not in printed.out
    assert (
        main(["train", *words(task, tmp_path, "dry", "rollout.kv_cache_bytes=256000000"), "--dry-run"]) == 0
    )
    assert "mrl train is refused here: a slot needs at least" in caplog.text


def test_a_shortage_names_what_helps_without_gpus(machine: None) -> None:
    refusal = memory_fit(load([], SMALLEST)).refusal
    assert "GiB in 'update'" in refusal and "is 8.0 GiB" in refusal
    assert "gpu_memory" not in refusal and "offload" not in refusal
    wide = memory_fit(load([], [*SMALLEST, "training.microbatch_tokens=4194304", "model.max_length=4096"]))
    assert "(activations " in wide.refusal
    advice = "GiB; a smaller training.microbatch_tokens (now 4194304; the longest sample has 4096)"
    assert advice in wide.refusal, "of the largest part first"


@pytest.mark.parametrize(("free", "word"), [(141 << 30, ""), (30 << 30, "at least"), (80 << 30, "probably")])
def test_on_gpus_the_fullest_of_those_in_use_decides(
    free: int, word: str, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, sizes = (1.0, 0.0, free / (150 << 30)), (150 << 30,) * 3
    gpus = Gpus(free_shares=shares, memory_bytes=sizes, torch=2, visible="0,2")
    monkeypatch.setattr(this_machine, "own_gpus", lambda: 2)
    monkeypatch.setattr(this_machine, "find_gpus", lambda: gpus)
    layout = ["training={layout: {dp: 8, ep: 8}, recompute: full}", "rollout.tp=8", "model.max_length=2048"]
    result = memory_fit(load([], [*SMALLEST, *layout]))
    sentence = result.refusal + result.warning
    assert bool(sentence) == bool(word) and word in sentence
    assert ("GPU with least free memory has" in sentence) == bool(word)
    monkeypatch.setattr(this_machine, "find_gpus", lambda: Gpus(torch=2))
    assert memory_fit(load([], [*SMALLEST, *layout])) == Fit(), "nvidia-smi does not tell"


def test_every_model_of_a_run_may_be_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = use_cache(monkeypatch, tmp_path)
    names = ("me/policy", "me/reference", "me/critic", "me/teacher")
    folders = [str(add_model(cache, name, write_model(tmp_path / name))) for name in names]
    policy, reference, critic, teacher = names
    words = [
        "run.name=a", "data.train=rows.jsonl", "reward.kind=maths", "algorithm.estimator.name=gae",
        f"model={{path: {policy}, reference_path: 'hf://{reference}'}}", f"critic.path={critic}",
        f"algorithm.distillation.teachers={{sums: {teacher}, products: {tmp_path}}}",
    ]  # fmt: skip
    config = with_local_models(load([], words))
    assert config.critic is not None and config.algorithm.distillation is not None
    assert [config.model.path, config.model.reference_path, config.critic.path] == folders[:3]
    assert config.algorithm.distillation.teachers == {"sums": folders[3], "products": str(tmp_path)}
    assert with_local_models(config) == config
    made = load([], [*words, "model.path=work/model", "model.new={}"])
    assert with_local_models(made).model.path == "work/model", "a model to make is not one to download"


def test_a_run_with_a_name_of_the_hub_is_checked_and_shown_with_its_folder(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = use_cache(monkeypatch, tmp_path / "home")
    snapshot = add_model(cache, "me/sums", Path(shutil.copytree(task / "model", tmp_path / "model")))
    assert main(["train", *words(task, tmp_path, "run", "model.path=me/sums"), "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == str(snapshot)
    for command, end in (("train", ["--dry-run"]), ("train", []), ("eval", []), ("data", []), ("plan", [])):
        assert main([command, *words(task, tmp_path, "run", "model.path=me/other"), *end]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("mrl: model.path = me/other does not exist"), err
        assert "run `hf download me/other`" in err and len(err.splitlines()) == 1
