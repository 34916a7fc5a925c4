"""Exports of distributed checkpoints by one process: bytes, files, memory and refusals."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.errors import CheckpointError, ConfigError
from mrl.launch.commands.export import export_run
from mrl.training.hf import export_folder, hf_folder
from tests.golden_run import ROOT
from tests.mrl.training.make_golden import GOLDEN
from tests.mrl.training.scenarios import digests_of_folder
from tests.support.checkpoints import write_checkpoint
from tests.tiny_models import write_model


def test_the_golden_checkpoint_is_exported_as_its_rank_held_it(golden_model: Path, tmp_path: Path) -> None:
    files = export_folder.export_checkpoint(
        GOLDEN / "checkpoint", tmp_path / "out", source=golden_model, dtype="float32", file_bytes=2000
    )
    expected = json.loads((GOLDEN / "expected.json").read_text())["digest"]
    assert digests_of_folder(tmp_path / "out", {}, dtype="float32") == [expected]
    index = json.loads((tmp_path / "out" / export_folder.INDEX).read_text())
    written = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert written == sorted(files.members) == sorted(set(index["weight_map"].values())) and len(written) > 3
    assert index["metadata"]["total_size"] == files.num_bytes
    assert not list(tmp_path.glob("*.partial"))


def test_an_export_of_another_type_is_rounded_once(golden_model: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        export_folder.export_checkpoint(
            GOLDEN / "checkpoint", tmp_path / dtype, source=golden_model, dtype=dtype
        )
    exact, rounded = (load_file(tmp_path / d / "model.safetensors") for d in ("float32", "bfloat16"))
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert json.loads((tmp_path / "bfloat16/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("changes", [
    {"num_hidden_layers": 2}, {"num_experts": 1}, {"vocab_size": 140}, {"moe_intermediate_size": 4},
    {"head_dim": 8},
], ids=str)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(changes, golden_model, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((golden_model / "config.json").read_text()) | changes
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"elements|no tensor for"):
        export_folder.export_checkpoint(
            GOLDEN / "checkpoint", tmp_path / "out", source=other, dtype="float32"
        )
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_folder_without_an_index_is_refused(golden_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a readable distributed checkpoint"):
        export_folder.export_checkpoint(tmp_path, tmp_path / "out", source=golden_model, dtype="float32")


PUBLISHED = {
    "Qwen3-235B-A22B": (36_945, 235_093_634_560, 470_187_269_120),
    "DeepSeek-V3": (45_395, 671_026_419_200, 2 * 671_026_419_200 + 2 * 58 * 256),
}
"""Tensors, parameters and bytes of the bfloat16 folders (DeepSeek-V3 without prediction layer and scales,
with 58 float32 correction biases). Qwen3: 94 layers of 3 x 128 experts, router, four projections, four norms.
DeepSeek-V3: 61 layers of seven for attention and two norms, three of 3, 58 of 3 x 257 + 2. Both: 3 more."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_tensors_and_sizes(name: str) -> None:
    folder = ROOT / "configs/models" / name
    files = export_folder.plan_files(folder, hf_folder.read_config(folder), dtype="bfloat16")
    assert (len(files.tensors), files.num_parameters, files.num_bytes) == PUBLISHED[name]
    sizes = [
        sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in m) for m in files.members.values()
    ]
    assert sum(sizes) == files.num_bytes and max(sizes) <= export_folder.FILE_BYTES


WATCHED = """
import sys
started = []
sys.addaudithook(lambda event, args: started.append(event) \
if event in EVENTS and args[0] != LDCONFIG else None)
from mrl.cli import main
code = main(sys.argv[1:])
import torch
engines = [name for name in ("megatron", "ray", "vllm") if name in sys.modules]
print("seen", code, started, engines, torch.distributed.is_initialized())
"""
EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system")
"""Python's audit events of everything that starts a process."""
LDCONFIG = "/sbin/ldconfig"
"""torch's CUDA build runs it on import to find its libraries."""


def test_a_run_of_128_ranks_is_exported_by_one_process_without_engines(golden_run, tmp_path) -> None:
    out = tmp_path / "out"
    program = f"EVENTS, LDCONFIG = frozenset({EVENTS!r}), {LDCONFIG!r}{WATCHED}"
    command = [sys.executable, "-c", program, "export", str(golden_run), "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[-1] == "seen 0 [] [] False", lines
    assert len(lines) == 2 and "18 tensors" in lines[0], lines
    assert len(load_file(out / "model.safetensors")) == 18


def test_a_dry_run_counts_and_writes_nothing(golden_run: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    summary = export_run(str(golden_run), None, max_shard_bytes=4000)
    assert summary.endswith("18 tensors, 2,720 parameters, 10,880 bytes of float32 in 3 files"), summary
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_and_an_absent_step_are_named(golden_run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"step-000007 is not a checkpoint of .*, which has step-000002"):
        export_run(str(golden_run), out, step=7)
    file = golden_run / "checkpoints/step-000002/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp does not have the digest"):
        export_run(str(golden_run), out, step=2)
    assert not Path(out).exists()


MEASURED = """
import sys
from pathlib import Path
from mrl.training.hf import export_folder as hf_export

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

small, model, source, checkpoint, out = map(Path, sys.argv[1:6])
hf_export.export_checkpoint(small, out / "small", source=model, dtype="float32")  # what a first use loads
before = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
hf_export.export_checkpoint(checkpoint, out / "measured", source=source, dtype="float32", \
file_bytes=int(sys.argv[6]))
print((kib("VmHWM") - before) << 10)
"""


WIDE = {"hidden_size": 256, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("family", "shape", "file_bytes", "chunks"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 256, "intermediate_size": 512}, 4 << 20, 2),
        # Its experts are turned on their way into a file, one tensor (here a chunk) at a time.
        ("gpt_oss", {"intermediate_size": 256, "num_hidden_layers": 28}, 48 << 20, 3),
    ],
)  # fmt: skip
def test_an_export_takes_the_memory_of_one_file(
    family: str, shape: dict[str, int], file_bytes: int, chunks: int, golden_model: Path, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "model", family, **WIDE | shape)
    write_checkpoint(tmp_path / "checkpoint", source)
    total, chunk = (source / "model.safetensors").stat().st_size, 8 * 2 * 256 * 256 * 4
    paths = [GOLDEN / "checkpoint", golden_model, source, tmp_path / "checkpoint", tmp_path]
    program = [sys.executable, "-c", MEASURED, *map(str, paths), str(file_bytes)]
    given_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that freed memory does not count
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=given_back)
    peak = int(done.stdout)
    assert peak < file_bytes + chunks * chunk + (16 << 20) < total / 2, (
        f"{peak >> 20} MiB of {total >> 20} MiB"
    )
    original, again = load_file(source / "model.safetensors"), {}
    for file in (tmp_path / "measured").glob("*.safetensors"):
        again |= load_file(file)
    assert original.keys() == again.keys() and all(torch.equal(original[n], again[n]) for n in original)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_checkpoint_whose_files_are_not_what_was_written_is_refused_in_a_sentence(
    file: str, golden_model: Path, tmp_path: Path
) -> None:
    """Also if a manifest lists them as they are."""
    checkpoint = Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint"))
    (checkpoint / file).write_bytes(b"\n")
    with pytest.raises(CheckpointError, match=r"cannot be read|not a readable"):
        export_folder.export_checkpoint(checkpoint, tmp_path / "out", source=golden_model, dtype="float32")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_of_weights_is_refused_in_a_sentence(golden_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(golden_model, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[1:])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        hf_folder.tensor_files(model)
    for text in ("[1]", "{", '{"weight_map": {"a": 1}}', "[" * 100_000):
        (model / export_folder.INDEX).write_text(text)
        with pytest.raises(ConfigError, match=r"index\.json is not an index of safetensors files"):
            hf_folder.tensor_files(model)
