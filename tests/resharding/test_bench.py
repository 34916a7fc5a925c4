"""The weight sync's benchmark: its comparisons, the steps on one GPU, and a real run under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.resharding import one_gpu
from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CHECKPOINT = family_of(TINY).checkpoint_tensors(TINY)


@pytest.mark.parametrize("element", [0, 1000, -1])
def test_one_wrong_element_is_a_difference_with_its_name(element: int) -> None:
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout(tp=2))[1], CPU)
    made = MadeUp(CHECKPOINT, version=3)
    assert storage.first_difference(made) is not None
    for tensor in CHECKPOINT:
        storage.load(tensor.name, made.box(tensor.name, (0,) * len(tensor.shape), tensor.shape, "bfloat16"))
    assert storage.first_difference(made) is None
    assert storage.first_difference(MadeUp(CHECKPOINT, version=4)) is not None
    name = "model.layers.2.mlp.experts.routed_experts.w13_weight"
    storage.flat[name].view(torch.int16)[element] ^= 1
    assert (storage.first_difference(made) or "").startswith(
        f"{name}: the box of model.layers.2.mlp.experts."
    )


ON_CPU = ("--model", "tiny", "--device", "cpu", "--repeats", "1", "--bucket-mib", "1")


def test_the_steps_of_one_gpu_run_over_shared_memory_and_every_byte_is_right(tmp_path, capsys) -> None:
    file = tmp_path / "out.json"
    assert one_gpu.main([*ON_CPU, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["check"] == "every byte as expected" and report["tensors"] == len(CHECKPOINT)
    measured = {k: v for k, v in report.items() if k.endswith(("_seconds", "_per_gb", "_over_device_copy"))}
    assert len(measured) == 9 and min(measured.values()) > 0
    assert report["sync_seconds"] > report["local_lane_seconds"]
    assert report["proved_sync_seconds"] > report["trainer_proof_seconds"]
    assert capsys.readouterr().out == one_gpu.table(report) + "\n"


@pytest.mark.integration
def test_both_modes_move_the_same_bytes_and_the_plan_moves_no_more_than_the_bound(tmp_path: Path) -> None:
    command = (
        f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()} -m benchmarks.resharding "
        "--train 1,1,2 --rollout 2 --bucket-mib 0.0625 --warm-up 1 --deadline 60 --repeats 2 --json"
    )
    done = subprocess.run(
        [sys.executable, *command.split(), f"{tmp_path}/out.json"],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    runs = {(run["mode"], run["verify"]): run for run in report["runs"]}
    assert list(runs) == [(mode, kind) for mode in ("planned", "whole") for kind in ("wire", "full")]
    for run in runs.values():
        assert run["check"] == "every byte as expected" and run["check_passed"] is True
        assert {"pack", "exchange", "wait", "unpack", "process", "commit", "moving"} <= set(run["seconds"])
        assert len(run["every_moving"]) == 2 and min(run["every_moving"]) > 0
        assert run["peak_extra_bytes"]["total"] >= 2 * report["bucket_bytes"]
        assert (run["seconds"]["prove"] > 0) == (run["verify"] == "full")
        assert run["gb_per_second"] > 0 and run["times_plain_copy"] > 0 and run["plan_seconds"] > 0
    moved = runs["planned", "wire"]["bytes"]
    assert moved["local"] + moved["in_node"] + moved["across_nodes"] == report["bytes_needed"] > 0
    assert moved["in_node"] == moved["lower_bound"] > 0 == moved["across_nodes"]
    assert moved["ratio_to_lower_bound"] == 1.0
    assert moved["lower_bound"] <= moved["message_bytes"] <= moved["lower_bound"] + 32 * moved["windows"] * 2
    assert runs["whole", "wire"]["bytes"]["received_from_other_slots"] > moved["lower_bound"]
    assert set(report["planned_over_whole"]) == {"verify_wire", "verify_full"}
    assert "planned moves" in done.stdout and "plain copy" in done.stdout
