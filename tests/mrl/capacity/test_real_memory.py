"""The plan's categories against torch storages of real ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.algorithms.objective import cross_entropy
from mrl.capacity.activations import activations
from mrl.capacity.model_facts import find_facts
from mrl.capacity.training_memory import stage_memory
from mrl.config.sections.critic import CriticSection
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.samples import Role, TrainBatch
from mrl.training.pass_options import PassOptions
from tests.mrl.training import scenarios
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration
TOKENS, SAMPLE = 1024, 64
BUCKET = 50_000
"""Parameters, so that a first stage with replicas has several buckets, each padded."""
SHAPE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "vocab_size": 512}
"""Wide enough that activations, not index arrays, make the sum."""


def section(layout: dict[str, int], recompute: str, dtype: str) -> TrainingSection:
    return TrainingSection.model_validate(
        {
            "layout": layout,
            "recompute": recompute,
            "dtype": dtype,
            "microbatch_tokens": TOKENS,
            "bucket_size": BUCKET,
        }
    )


def measure(
    rank: int, world_size: int, port: int, folder: Path, training: TrainingSection, role: Role = "policy"
) -> dict[str, int]:
    """Return the bytes of this rank's unique storages during an update of one microbatch."""
    model_section = ModelSection(path=str(folder), max_length=TOKENS)
    worker = scenarios.worker_of(rank, world_size, port, model_section, training)
    if role == "critic":
        worker.add_critic(CriticSection())
    model = worker.critic or worker.policy
    buffers = model.memory.buffers
    weights, gradients = storages(b.param_data for b in buffers), storages(b.grad_data for b in buffers)
    kept: dict[int, int] = {}
    alive: list[Any] = []
    backward = False

    def pack(tensor: Any) -> Any:
        address = tensor.untyped_storage().data_ptr()
        if not backward and address not in weights and address not in kept:
            kept[address] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no later tensor gets the same address
        return tensor

    def unpack(tensor: Any) -> Any:
        nonlocal backward
        backward = True  # what a recomputed layer saves is working memory
        return tensor

    objective = squared_values if role == "critic" else cross_entropy
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        worker.update(
            batch(worker.place.dp), objective, {"num_tokens": float(TOKENS)}, PassOptions(role=role)
        )
    optimizer = {a: size for a, size in storages(optimizer_tensors(model)).items() if a not in weights}
    worker.close()
    return {
        "weights": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "optimizer": sum(optimizer.values()),
        "activations": sum(kept.values()),
    }


def squared_values(*, values: Any, denominators: dict[str, float], **_: Any) -> tuple[Any, dict[str, Any]]:
    return values.square().sum() / denominators["num_tokens"], {}


def optimizer_tensors(model: Any) -> list[Any]:
    tensors = []
    for part in model.optimizer.parts():
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter].values()
                tensors += [parameter, *(v for v in state if torch.is_tensor(v))]
    return tensors


def storages(tensors: Any) -> dict[int, int]:
    """Return address -> bytes of the tensors' storages."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def batch(seed: int) -> TrainBatch:
    count = TOKENS // SAMPLE
    return TrainBatch(
        tokens=np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], TOKENS),
        cu_seqlens=np.arange(0, TOKENS + 1, SAMPLE).astype(np.int32),
        loss_mask=np.tile(np.arange(SAMPLE) > 0, count),
        group_ids=np.arange(count),
        sample_ids=tuple(f"{i}.0" for i in range(count)),
        arrays={},
    )


@pytest.mark.parametrize(
    ("layout", "recompute", "dtype"),
    [
        ({"ep": 2, "dp": 2}, "off", "bfloat16"),
        ({"tp": 2, "ep": 2}, "off", "float32"),
        ({"ep": 2, "dp": 2}, "selective", "float32"),
        ({"pp": 2}, "full", "float32"),
        pytest.param({"cp": 2, "ep": 2}, "off", "float32", marks=pytest.mark.slow),
    ],
    ids=["ep2-off-bf16", "tp2ep2-off-fp32", "ep2-selective-fp32", "pp2-full-fp32", "cp2ep2-off-fp32"],
)
def test_every_category_is_within_five_per_cent(layout, recompute, dtype, tmp_path) -> None:
    """Sum over ranks: a plan assumes evenly loaded experts, which a real router does not give."""
    folder = write_model(tmp_path / "model", **SHAPE)
    training = section(layout, recompute, dtype)
    facts, sizes = find_facts(ModelSection(path=str(folder))), training.layout.sizes()
    stages = stage_memory(facts, training)
    planned = {"weights": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    for rank in range(sizes.world_size):
        pp = sizes.coordinates(rank).pp
        kept = activations(facts, training, sizes, stage=pp, tokens=TOKENS, num_microbatches=1, fused=False)
        planned["weights"] += stages[pp].weights
        planned["gradients"] += stages[pp].gradients
        planned["optimizer"] += stages[pp].optimizer
        planned["activations"] += kept.kept
    ranks = run_ranks(measure, sizes.world_size, folder, training)
    real = {name: sum(rank[name] for rank in ranks) for name in planned}
    assert real["weights"] == planned["weights"]
    assert real["gradients"] == planned["gradients"]
    assert planned == pytest.approx(real, rel=0.05), f"planned {planned}, real {real}"


def test_a_critics_memory_is_as_planned(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **SHAPE)
    training = section({"ep": 2, "dp": 2}, "off", "bfloat16")
    facts = find_facts(ModelSection(path=str(folder)))
    (planned,) = stage_memory(facts, training, value_head=True)
    for real in run_ranks(measure, 2, folder, training, "critic"):
        assert real["weights"] == planned.weights
        assert real["gradients"] == planned.gradients
        assert real["optimizer"] == pytest.approx(planned.optimizer, rel=0.05)
