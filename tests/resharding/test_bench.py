"""The weight sync's benchmark: its parts alone, and real runs under torchrun, one of them broken on purpose."""

import contextlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.resharding import one_gpu
from benchmarks.resharding.__main__ import arguments, layouts
from benchmarks.resharding.child import Child
from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import FOLDERS, TINY, config_of
from benchmarks.resharding.peak_memory import PeakMemory
from benchmarks.resharding.storage import Storage
from benchmarks.resharding.trainer import BenchTrainer
from mrl.errors import ConfigError, WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CHECKPOINT = family_of(TINY).checkpoint_tensors(TINY)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_scaled_model_keeps_its_widths_and_fits_both_layouts(name: str) -> None:
    train = Layout(tp=2, pp=2, ep=2)
    whole, small = (config_of(name, scale=s, train=train) for s in (1, 0.05))
    same = {"hidden_size", "moe_intermediate_size", "num_attention_heads", "intermediate_size", "model_type"}
    assert {k: whole[k] for k in same} == {k: small[k] for k in same}
    assert small["num_hidden_layers"] < whole["num_hidden_layers"] / 10
    held = trainer_manifests.trainer_rank_manifests(small, train)
    needed = engine_manifests.engine_rank_manifests(small, Layout(tp=2, dp=2))
    assert len(held) == len(needed) == 4
    with pytest.raises(ConfigError, match="--scale 0 must be above 0"):
        config_of(name, scale=0, train=train)


def test_made_up_bytes_follow_from_name_place_and_version() -> None:
    made, later = MadeUp(CHECKPOINT, version=0), MadeUp(CHECKPOINT, version=1)
    matrix = next(t for t in CHECKPOINT if t.name.endswith("q_proj.weight"))
    whole = made.box(matrix.name, (0, 0), matrix.shape, "bfloat16")
    assert torch.equal(made.box(matrix.name, (3, 5), (7, 11), "bfloat16"), whole[3:10, 5:16])
    assert whole.isfinite().all() and not torch.equal(
        whole, later.box(matrix.name, (0, 0), matrix.shape, "bfloat16")
    )
    vectors = [made.box(t.name, (0,), (16,), "float32") for t in CHECKPOINT if len(t.shape) == 1]
    assert len({tuple(v.tolist()) for v in vectors}) == len(vectors)


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


def test_a_trainer_rank_holds_its_manifest_in_two_shared_buffers() -> None:
    layout = Layout(tp=2, ep=2)
    trainer = BenchTrainer(TINY, layout, 1, device=CPU)
    trainer.fill(2)
    made = MadeUp(CHECKPOINT, version=2)
    located = trainer.local_tensors()
    assert [t for t, _, _, _ in located] == list(
        trainer_manifests.trainer_rank_manifests(TINY, layout)[1].tensors
    )
    assert {buffer for _, _, buffer, _ in located} == {0, 1}
    for tensor, view, buffer, at in located:
        assert made.first_difference(tensor, view.view(-1)) is None
        assert view.data_ptr() == trainer.memory.buffers[buffer].param_data.data_ptr() + at
    del located, view
    trainer.close()


def test_plain_copies_write_every_byte_once_round_and_round() -> None:
    storage = Storage(engine_manifests.engine_rank_manifests(TINY, Layout())[0], CPU)
    source = torch.arange(100, dtype=torch.uint8)
    storage.copy_plainly([source[:60], source[60:]])
    written = torch.cat([flat.view(torch.uint8) for flat in storage.flat.values()])
    assert torch.equal(written, source.repeat(-(-len(written) // 100))[: len(written)])


class Grower:
    """Something a child process runs."""

    def grow(self, num_bytes: int) -> int:
        self._kept = torch.ones(num_bytes, dtype=torch.uint8)
        return len(self._kept)

    def fail(self) -> None:
        raise ValueError("on purpose")

    def close(self) -> None:
        pass


def test_a_childs_memory_is_seen_and_its_errors_come_back() -> None:
    child = Child(Grower, seconds=60.0)
    with PeakMemory([os.getpid(), child.pid]) as peak:
        assert child.call("grow", 200 << 20) == 200 << 20
    assert 180 << 20 < peak.extra_bytes < 600 << 20
    with pytest.raises(WeightSyncError, match="on purpose"):
        child.call("fail")
    child.close()


@pytest.mark.parametrize(
    ("words", "what"), [(["--train", "2,1"], "tp,pp,ep"), (["--train", "3,1,1"], "must both divide")]
)
def test_layouts_that_do_not_fit_the_world_are_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        layouts(arguments().parse_args(words), 4)


ON_CPU = ("--model", "tiny", "--device", "cpu", "--repeats", "1", "--bucket-mib", "1")


def test_the_steps_of_one_gpu_run_over_shared_memory_and_every_byte_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert one_gpu.main([*ON_CPU, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["check"] == "every byte as expected" and report["tensors"] == len(CHECKPOINT)
    measured = {k: v for k, v in report.items() if k.endswith(("_seconds", "_per_gb", "_over_device_copy"))}
    assert len(measured) == 9 and min(measured.values()) > 0
    assert report["sync_seconds"] > report["local_lane_seconds"]
    assert report["proved_sync_seconds"] > report["trainer_proof_seconds"]
    assert capsys.readouterr().out == one_gpu.table(report) + "\n"


@pytest.mark.parametrize(("seconds", "verdict"), [(0.0139, "72%, met"), (0.0145, "69%, missed")])
def test_the_table_of_one_gpu_says_whether_the_target_was_met(seconds: float, verdict: str) -> None:
    """10 GB where a device copies 1,000 GB/s."""
    report: dict[str, Any] = dict.fromkeys((name for name, _ in one_gpu._ROWS), 0.02)
    report |= {"model": "m", "scale": 1.0, "device": "d", "torch": "2", "tensors": 7, "check": "right"}
    report |= {"weights_bytes": 10**10, "device_copy_seconds_per_gb": 1e-3, "digest_seconds_per_gb": 2e-3}
    report |= {"local_lane_seconds": seconds, "local_lane_over_device_copy": 0.01 / seconds}
    lines = one_gpu.table(report).splitlines()
    assert lines[-2].endswith(verdict) and lines[-1] == "bytes: right"
    assert lines[3].split() == ["device", "copy", "0.0100", "1000.0", "100%"]
    assert len(lines) == 5 + len(one_gpu._ROWS)


NEEDED = ("torch", "numpy", "pyzmq", "pydantic", "xxhash", "psutil")
GUARD = """
import importlib.abc, sys

class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"no module named {{name!r}}: it is not among what one_gpu needs", name=name)

sys.meta_path.insert(0, Guard())
"""


def _closure(names: Sequence[str]) -> set[str]:
    """Distributions and, over and over, what they need."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            wanted = [Requirement(line) for line in requires(name) or []]
            waiting += [
                canonicalize_name(w.name) for w in wanted if not w.marker or w.marker.evaluate({"extra": ""})
            ]
    return found


def test_one_gpu_needs_six_packages_and_nothing_else(tmp_path: Path) -> None:
    """Every other package of this environment cannot be imported, neither by it nor by the process it starts."""
    needed = _closure(NEEDED)
    refused = {
        module
        for module, owners in packages_distributions().items()
        if not needed & {canonicalize_name(owner) for owner in owners}
    } - {"mrl", "benchmarks", "models", "resharding", "launch"}
    assert {"megatron", "vllm", "ray", "transformers"} <= refused and "torch" not in refused
    (tmp_path / "sitecustomize.py").write_text(GUARD.format(refused=refused))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resharding.one_gpu", *ON_CPU], cwd=ROOT, capture_output=True, text=True,
        timeout=200, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "bytes: every byte as expected" in done.stdout, done.stdout + done.stderr
    words = [sys.executable, "-c", "import vllm"]
    proof = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert "not among what one_gpu needs" in proof.stderr, "the guard stands"


def test_one_gpu_says_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device is visible; --device cpu"):
        one_gpu.main([])


# -- real runs ----------------------------------------------------------------------------------------------------


def torchrun(program: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    options = [
        "--train",
        "1,1,2",
        "--rollout",
        "2",
        "--bucket-mib",
        "0.0625",
        "--warm-up",
        "1",
        "--deadline",
        "60",
    ]
    return subprocess.run(
        [*command, *program, *options, *words], cwd=ROOT, capture_output=True, text=True, timeout=150,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.integration
def test_both_modes_move_the_same_bytes_and_the_plan_moves_no_more_than_the_bound(tmp_path: Path) -> None:
    done = torchrun(["-m", "resharding.bench"], "--repeats", "2", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    runs = {(run["mode"], run["verify"]): run for run in report["runs"]}
    assert list(runs) == [(mode, kind) for mode in ("planned", "whole") for kind in ("off", "wire", "full")]
    for run in runs.values():
        assert run["check"] == "every byte as expected" and run["check_passed"] is True
        assert {"pack", "exchange", "wait", "unpack", "process", "commit", "moving"} <= set(run["seconds"])
        assert len(run["every_moving"]) == 2 and min(run["every_moving"]) > 0
        assert run["peak_extra_bytes"]["total"] >= 2 * report["bucket_bytes"]
        assert (run["seconds"]["prove"] > 0) == (run["verify"] == "full")
        assert run["gb_per_second"] > 0 and run["times_plain_copy"] > 0 and run["plan_seconds"] > 0
    moved = runs["planned", "off"]["bytes"]
    assert moved["local"] + moved["in_node"] + moved["across_nodes"] == report["bytes_needed"] > 0
    assert moved["in_node"] == moved["lower_bound"] > 0 == moved["across_nodes"]
    assert moved["ratio_to_lower_bound"] == 1.0
    assert moved["lower_bound"] <= moved["message_bytes"] <= moved["lower_bound"] + 32 * moved["windows"] * 2
    assert runs["whole", "wire"]["bytes"]["received_from_other_slots"] > moved["lower_bound"]
    assert set(report["planned_over_whole"]) == {"verify_off", "verify_wire", "verify_full"}
    assert "planned moves" in done.stdout and "plain copy" in done.stdout


@pytest.mark.integration
def test_between_machines_a_window_is_packed_while_the_one_before_travels(tmp_path: Path) -> None:
    """Both slots as on machines of their own; the timeline is read as a viewer reads it."""
    trace, out = tmp_path / "trace.json", tmp_path / "out.json"
    words = ("--slots-per-node", "1", "--mode", "planned", "--verify", "wire", "--repeats", "1")
    done = torchrun(["-m", "resharding.bench"], *words, "--trace", str(trace), "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    assert run["check_passed"] and run["packed_meanwhile"] > 0.99
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["receiver 0", "receiver 1", "trainer 0", "trainer 1"]
    spans = {(names[e["pid"]], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    windows = run["bytes"]["windows"]
    assert windows > 2
    for rank in range(2):
        for window in range(windows):
            begin, end = spans[f"trainer {rank}", f"pack {window}"]
            travels = spans[f"trainer {rank}", f"travel {window}"]
            taken = spans[f"receiver {rank}", f"take {window}"]
            assert begin <= end <= travels[0] <= travels[1] and taken[1] > travels[0]
            if window:
                before = spans[f"trainer {rank}", f"travel {window - 1}"]
                assert before[0] <= begin and end <= before[1], (rank, window)


@pytest.mark.integration
def test_both_modes_leave_the_same_quantised_bytes(tmp_path: Path) -> None:
    """One layer of eight experts at their real widths; each slot has half of the experts and lacks the others."""
    words = ("--model", "qwen3-30b-a3b", "--scale", "0.02", "--rollout", "1", "--quantize", "fp8_block")
    words += ("--bucket-mib", "4", "--repeats", "1", "--json", str(tmp_path / "out.json"))
    done = torchrun(["-m", "resharding.bench"], *words)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert [run["check"] for run in report["runs"]] == ["every byte as expected"] * 6
    moved = report["runs"][0]["bytes"]
    scales = 768 * 2048 // 128**2 * 4
    assert moved["in_node"] == moved["lower_bound"] == 2 * 4 * 3 * (768 * 2048 + scales)
    assert moved["whole"] == 0 and report["quantize"] == "fp8_block"


def test_the_module_named_in_the_readme_ends_with_the_benchmarks_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.resharding.__main__.main", lambda: 1)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("resharding.bench", run_name="__main__")
    assert ended.value.code == 1


BROKEN = """
import sys
from benchmarks.resharding import storage
from benchmarks.resharding import one_gpu
from benchmarks.resharding.__main__ import main

copy = storage.run_copies
storage.run_copies = lambda table, sources, targets: copy(table[:-1], sources, targets)
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.integration
def test_a_weight_sync_that_leaves_a_copy_out_fails_the_run(tmp_path: Path) -> None:
    """The benchmark's own comparison finds it, and a full session does not even commit it."""
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    words = ("--mode", "planned", "--repeats", "1", "--json", str(tmp_path / "out.json"))
    done = torchrun([str(program)], *words, "--verify", "off", "wire")
    assert done.returncode != 0
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["check_passed"] for run in runs] == [False, False]
    assert "the box of" in runs[0]["check"], done.stdout
    done = torchrun([str(program)], *words, "--verify", "full")
    assert done.returncode != 0 and "not what the trainer's parameters hold" in done.stderr
