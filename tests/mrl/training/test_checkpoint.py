"""Checkpoints of real ranks: exact resume, another layout, damage, and many saves inside actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sections.training import LayoutSection
from mrl.training.hf import export_folder
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import require_close
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

SAVED: dict[str, int] = {"ep": 2, "dp": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a folder with a checkpoint after two steps, and the ranks' later results."""
    out = tmp_path_factory.mktemp("saved")
    return out, run_ranks(scenarios.save_then_go_on, 2, str(folder), SAVED, str(out), "float32")


def resume(folder: Path, layout: dict[str, int], path: Path, out: Path, dtype: str = "float32") -> list[Any]:
    world = LayoutSection(**layout).world_size
    return run_ranks(scenarios.resume_and_go_on, world, str(folder), layout, str(path), str(out), dtype)


def test_the_same_layout_goes_on_to_the_last_bit(folder, saved, tmp_path) -> None:
    out, before = saved
    after = resume(folder, SAVED, out / "step-00000002", tmp_path / "export")
    for first, second in zip(before, after, strict=True):
        for key in ("digest", "metrics", "drawn"):
            assert first[key] == second[key], key
        assert second["steps"] == 2
        assert second["extra"]["position"] == 17
        np.testing.assert_array_equal(second["extra"]["seeds"], np.arange(3))
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "export", out / "after-0-2"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_process_exports_what_each_rank_held(folder, saved, tmp_path) -> None:
    """Assemble the checkpoint of two ranks without starting anything: every piece of every rank, bitwise."""
    out, ranks = saved
    export_folder.export_checkpoint(
        out / "step-00000002", tmp_path / "export", source=folder, dtype="float32"
    )
    digests = scenarios.digests_of_folder(tmp_path / "export", SAVED, dtype="float32")
    assert digests == [rank["digest"] for rank in ranks]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2, "vpp": 2}], ids=["one", "tp2", "pp2-vpp2"])
def test_another_layout_goes_on_with_equal_state(layout, folder, saved, tmp_path) -> None:
    """Two more Adam steps need parameters, moments, step count and schedule, all from the saved run."""
    out, before = saved
    after = resume(folder, layout, out / "step-00000002", tmp_path / "export")
    for ours, theirs in zip(after[0]["metrics"], before[0]["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    trained, expected = (load_file(p / "model.safetensors") for p in (tmp_path / "export", out / "after-0-2"))
    require_close(trained, expected)


def test_bfloat16_resumes_to_the_last_bit(folder: Path, tmp_path: Path) -> None:
    """The float32 master weights come from the checkpoint, not from the rounded parameters."""
    before = run_ranks(scenarios.save_then_go_on, 1, str(folder), {}, str(tmp_path), "bfloat16")
    after = resume(folder, {}, tmp_path / "step-00000002", tmp_path / "export", "bfloat16")
    assert before[0]["metrics"] == after[0]["metrics"]
    assert before[0]["digest"] == after[0]["digest"]


def test_a_damaged_checkpoint_is_refused_by_name(folder, saved, tmp_path) -> None:
    out, _ = saved
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in (out / "step-00000002").iterdir():
        data = bytearray(file.read_bytes())
        if file.name == "__1_0.distcp":
            data[len(data) // 2] ^= 1
        (damaged / file.name).write_bytes(data)
    with pytest.raises(AssertionError, match=r"DamagedCheckpoint: .*__1_0\.distcp does not have the digest"):
        resume(folder, {}, damaged, tmp_path / "export")


def test_a_save_beside_training_holds_the_step_it_was_made_at(folder: Path, tmp_path: Path) -> None:
    for rank in run_ranks(scenarios.save_beside, 2, str(folder), SAVED, str(tmp_path)):
        assert not rank["seen_before"], "visible before the commit"
        assert rank["saved"] == rank["loaded"] != rank["trained"]
        assert "rank 1" in rank["error"] and "__1_0.distcp" in rank["error"]
        assert not rank["left"]


def test_what_generators_draw_follows_from_the_seed_and_the_rank(folder: Path) -> None:
    """Two runs are then equal even if a user's loss draws random numbers."""
    first, second = (run_ranks(scenarios.first_draws, 2, str(folder), SAVED) for _ in range(2))
    assert first == second
    assert all(ours != theirs for ours, theirs in zip(*(rank[:2] for rank in first), strict=True))


def test_every_process_group_fails_after_the_configured_time(folder: Path) -> None:
    for seconds in run_ranks(scenarios.timeouts, 2, str(folder), SAVED):
        assert len(seconds) > 5 and set(seconds) == {77.5}


def test_a_save_takes_the_memory_of_one_tensor_and_one_beside_training_that_of_the_state(tmp_path) -> None:
    """The largest tensor is 1 / 35 of the state; Megatron's own format gathers and copies all of it."""
    model = write_model(
        tmp_path / "model", hidden_size=256, moe_intermediate_size=256, num_hidden_layers=8, num_experts=8
    )
    (sizes,) = run_ranks(scenarios.memory_of_saves, 1, str(model), str(tmp_path))
    assert sizes["now"] < sizes["file"] / 5, sizes
    assert 0.8 * sizes["file"] < sizes["beside"] < 1.3 * sizes["file"], sizes
