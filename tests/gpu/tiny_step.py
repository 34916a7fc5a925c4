"""A tiny mixture of experts, one training step of it, and the same step on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.config.sections.training import OptimizerSection, TrainingSection
from mrl.prepare import new_model
from mrl.samples import TrainBatch
from mrl.training.worker import MegatronWorker

MAX_LENGTH = 64
Dtype = Literal["float32", "bfloat16"]


def write_model(folder: Path, *, large: bool) -> None:
    """Write a random Qwen3-MoE of 1.2 million parameters, or of 170 million, which show in GPU memory."""
    rows = folder.parent / f"{folder.name}.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(20))
    )
    new = NewModelSection(hidden_size=1024, num_experts=16, expert_size=768) if large else NewModelSection()
    new_model.make_new_model(new, [str(rows)], folder, max_length=MAX_LENGTH, seed=0)
    rows.unlink()


def start_tiny_worker(folder: str, dtype: Dtype = "float32") -> MegatronWorker:
    return MegatronWorker(
        ModelSection(path=folder, max_length=MAX_LENGTH),
        TrainingSection(dtype=dtype, microbatch_tokens=256, optimizer=OptimizerSection(lr=1e-3)),
        rank=0,
        world_size=1,
        store=f"{tempfile.mkdtemp(dir=folder)}/store",
    )


def make_batch() -> TrainBatch:
    """Return 32 samples of 8 to 32 tokens; the second half of each is trained on."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 33, 32)
    ends = np.cumsum(lengths)
    inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return TrainBatch(
        tokens=rng.integers(2, 14, ends[-1]),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        loss_mask=inside >= np.repeat(lengths // 2, lengths),
        group_ids=np.arange(32),
        sample_ids=tuple(f"{i}.0" for i in range(32)),
        arrays={},
    )


def train_step(worker: MegatronWorker) -> dict[str, Any]:
    """Return log-probs before and after one optimizer step, and its metrics."""
    batch = make_batch()
    before = worker.forward(batch)
    metrics = worker.update(batch, cross_entropy, {"num_tokens": int(batch.loss_mask.sum())})
    after = worker.forward(batch)
    assert before is not None and after is not None
    return {
        "before": before["logprobs"].tolist(),
        "after": after["logprobs"].tolist(),
        "grad_norm": metrics["grad_norm"],
    }


def reference(folder: str) -> dict[str, Any]:
    """Run the same step in a process that sees no GPU."""
    out = Path(folder) / "reference.json"
    command = [sys.executable, "-m", __name__, folder, str(out)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return json.loads(out.read_text())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train_step(start_tiny_worker(sys.argv[1]))))
