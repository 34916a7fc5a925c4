"""The hybrid engine over several layouts: engines, trainer and an export agree after real updates and weight syncs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.root import Config
from mrl.config.sections.launch import LaunchSection
from mrl.errors import MrlError
from mrl.launch.cluster.cluster import cluster
from mrl.loops.learn import denominators
from mrl.loops.mismatch import measure
from mrl.training.batch import pack, policy_versions
from mrl.training.hf import export
from tests.launch.hybrid_runs import groups_of, running, sampled, tiny_config
from tests.tiny_models import reference_logprobs, write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LAYOUTS = {
    "tp2-ep2-to-1": ("training.layout={tp: 2, pp: 1, ep: 2, dp: 1}", "rollout.tp=1"),
    "pp2-to-2": ("training.layout={tp: 1, pp: 2, ep: 1, dp: 1}", "rollout.tp=2"),
    "tp2-ep2-to-1-gathered": (
        "training.layout={tp: 2, pp: 1, ep: 2, dp: 1}",
        "rollout.tp=1",
        "sync.mode=gather",
    ),
    "pp2-to-1-distributed": (
        "training.layout={tp: 1, pp: 2, ep: 1, dp: 1}",
        "rollout.tp=1",
        "sync.transport=distributed",
    ),
    "ep2-dp2-to-2-offloaded": (
        "training.layout={tp: 1, pp: 1, ep: 2, dp: 2}",
        "rollout.tp=2",
        "training.offload=always",
    ),
    "cp2-ep2-to-1": ("training.layout={tp: 1, pp: 1, cp: 2, ep: 2, dp: 1}", "rollout.tp=1"),
}
FAMILIES = {
    "deepseek_v3": ("training.layout={tp: 2, pp: 1, ep: 2, dp: 1}", "rollout.tp=1"),
}
SLOW_FAMILIES = {
    "mixtral": ("training.layout={tp: 2, pp: 1, ep: 2, dp: 1}", "rollout.tp=2"),
}
"""Model type -> the words of its configuration; the folder's correction biases are not zero."""
SLOW_LAYOUTS = {
    "dp2-to-1": ("training.layout={tp: 1, pp: 1, ep: 1, dp: 2}", "rollout.tp=1"),
    "pp2-to-1-nixl": (
        "training.layout={tp: 1, pp: 2, ep: 1, dp: 1}",
        "rollout.tp=1",
        "sync.transport=nixl",
    ),
    "pp2-vpp2-to-1": ("training.layout={tp: 1, pp: 2, vpp: 2, ep: 1, dp: 1}", "rollout.tp=1"),
    "tp2-etp2-to-1": ("training.layout={tp: 2, pp: 1, ep: 1, etp: 2, dp: 1}", "rollout.tp=1"),
    "tp2-pp2-ep2-to-2": ("training.layout={tp: 2, pp: 2, ep: 2, dp: 1}", "rollout.tp=2"),
}
MEMORY_CAP = 2500 << 20
"""Bytes of all processes of a run (shared pages counted once), for each slot."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=4):
        yield


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)]
)
def test_engines_trainer_and_export_agree_after_updates(
    layout: str, task: Path, ray_cluster: None, tmp_path: Path
) -> None:
    check_agreement(tiny_config(task / "model", task, *(LAYOUTS | SLOW_LAYOUTS)[layout]), tmp_path)


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]
)
def test_other_families_agree_after_updates(
    family: str, task: Path, ray_cluster: None, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / family, family, hidden_size=64, head_dim=64, moe_intermediate_size=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(task / "model" / name, folder / name)
    check_agreement(tiny_config(folder, task, *(FAMILIES | SLOW_FAMILIES)[family]), tmp_path)


def check_agreement(config: Config, tmp_path: Path) -> None:
    """Two updates, each synced; then engines, trainer and an export say the same of new responses."""
    rng = np.random.default_rng(0)
    prompts = [
        p for _ in range(8) for p in [rng.integers(3, 15, int(rng.integers(1, 8))).astype(np.int32)] * 2
    ]
    with running(config, tmp_path / "logs") as hybrid:
        hybrid.sync(0)
        before = None
        for version in range(2):
            groups = groups_of(prompts, sampled(hybrid, prompts), version)
            hybrid.rest()
            batch = pack(groups)
            forward = hybrid.train.forward(batch, role="policy", temperature=1.0, with_router_margins=True)
            served = policy_versions(groups) == version
            margins = forward["router_margin"]
            found = measure(batch, forward["logprobs"], margins, served=served, margin=1e-5)
            assert found["policy/rollout_logprob_diff_max"] < 1e-4, found
            before = forward["logprobs"]
            batch, _ = shape_and_estimate(config.algorithm, batch.with_arrays(old_logprobs=before), groups)
            metrics = hybrid.train.update(batch, denominators(batch))
            assert metrics["grad_norm"] > 0
            moved = hybrid.sync(version + 1)
            assert not moved.get("sync/fallback_bytes"), (
                moved
            )  # the gathering mode has no plan to fall back from
        if config.training.offload == "always":
            with pytest.raises(MrlError, match="parameters are off-loaded"):
                hybrid.train.on_all(lambda actor: actor.worker.policy.memory.export())
        responses = sampled(hybrid, prompts)
        hybrid.rest()
        batch = pack(groups_of(prompts, responses, 2))
        forward = hybrid.train.forward(batch, role="policy", temperature=1.0, with_router_margins=True)
        shards = str(tmp_path / "shards")
        hybrid.train.on_all(lambda actor: actor.worker.save_weights(shards))
        used = sum(p.memory_full_info().pss for p in psutil.Process().children(recursive=True))
    export.export_checkpoint(
        tmp_path / "shards",
        tmp_path / "export",
        source=Path(config.model.path),
        dtype=config.training.dtype,
    )
    assert used < MEMORY_CAP * config.training.layout.world_size, f"{used >> 20} MiB"
    clear = batch.loss_mask & (forward["router_margin"] > 1e-5)
    assert clear.sum() > 20
    reference, _ = reference_logprobs(tmp_path / "export", batch)
    rollout = batch.arrays["rollout_logprobs"]
    assert np.abs(rollout - forward["logprobs"])[clear].max() < 1e-4
    assert np.abs(reference - forward["logprobs"])[clear].max() < 1e-4
    assert np.abs(reference_logprobs(Path(config.model.path), batch)[0] - reference)[clear].max() > 1e-3, (
        "the updates changed nothing"
    )
