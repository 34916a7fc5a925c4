"""A real float32 engine of a model with delta nets on CPU: its loaders, a planned weight sync, and the log-probs it then serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.training.hf import hf_folder
from mrl.training.hf import read_values as hf_values
from tests.engines import ENGINE_SHAPE, EngineHost, host_of
from tests.mrl.rollout import driving
from tests.resharding.feeding import Feeder
from tests.resharding.leasing import LeasedRank
from tests.resharding.vllm.sessions import SYNC, described, planned_session
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

SHAPE: dict[str, Any] = ENGINE_SHAPE | {"num_hidden_layers": 2, "full_attention_interval": 2}
ASKED = [
    dataclasses.replace(request, request_id=f"{number}.0")
    for number, request in enumerate(driving.requests(6, length=100, max_tokens=40, seed=3, ignore_stop=True))
]
"""Prompts of two chunks of the rule, longer than a step of the engine takes at once."""


@pytest.fixture(scope="module", params=["qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / request.param, request.param, **SHAPE)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineHost]:
    host = host_of(model, engine={"sync": SYNC}, max_num_seqs=4, max_num_batched_tokens=128)
    yield host
    host.close()


def test_a_planned_weight_sync_serves_the_log_probs_of_transformers(engine: EngineHost, model: Path) -> None:
    """From one trainer rank, whose rows lie by key head; prompts come in parts, requests come and go, and are paused."""
    hf = hf_folder.read_config(model)
    family, one = family_of(hf), Layout()
    held = family.local_tensors(hf, one, one.place(0), dtype="float32")
    values = [torch.empty(tensor.shape) for tensor in held]
    hf_values.load_folder(model, family, hf, zip(held, values, strict=True))

    manifests = described(engine, model)
    (expected,) = engine_manifests.engine_rank_manifests(hf, one, dtype="float32")
    assert {t.name: t for t in manifests[0].tensors} == {t.name: t for t in expected.tensors}
    assert manifests[0].unplanned == ()
    plan = build_plan(
        [RankManifest.of(0, held)], manifests, Topology.shared(1), PlanOptions(bucket_bytes=64 << 10)
    )
    assert plan.summary()["whole_bytes"] == 0
    feeder = Feeder(engine.call(driving.addresses), SYNC)
    trainer = LeasedRank(held, values)
    assert planned_session(engine, trainer, feeder, plan) == []
    trainer.close()
    for answers in (engine.call(driving.generate, ASKED), engine.call(driving.in_segments, ASKED, 9)):
        assert driving.worst_gap(model, ASKED, answers) < 1e-5
    engine.call(driving.release)
    feeder.close()
