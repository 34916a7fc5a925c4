"""Every family: Megatron against transformers in each kind of layout, and an engine after a weight sync.

A family takes part by its entry in tests/tiny_models.py. CI runs SHORT and SERVED; the others are slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import Completion, GenerationRequest
from mrl.training.hf.hf_folder import read_config
from tests.engines import EngineHost, host_of
from tests.mrl.rollout import driving
from tests.mrl.training.layouts import check_family, check_forward
from tests.resharding.feeding import Feeder, read, stacks
from tests.resharding.leasing import LeasedRank, spread
from tests.resharding.vllm.sessions import ASKED, SYNC, described, planned_session, sync_weights
from tests.tiny_models import FAMILIES, write_model

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2},
    "ep2-dp2": {"ep": 2, "dp": 2},
    "cp2": {"cp": 2},
}
SHORT = {
    "qwen3_moe": ("one", "ep2-dp2"),
    "qwen3_next": ("one", "tp2-pp2-ep2", "cp2"),
    "deepseek_v3": ("one", "cp2"),
    "gpt_oss": ("one", "tp2-pp2-ep2"),
}
"""Runs before a merge, one family per mechanism; test_layouts.py has more layouts of some families."""
SAME_TENSORS = (
    *("llama", "llama_yarn", "mistral", "mistral3", "qwen3_moe_yarn", "qwen3_next_yarn", "kimi_k2"),
)
"""Differ from another family only in angles, untied heads, expert groups or names: one rank is enough."""
MORE = {
    "deepseek_v3": ("ep2-dp2",),
    "gpt_oss": ("ep2-dp2", "cp2"),
    "qwen3_5": ("cp2",),
    "ministral3": ("cp2",),
}
"""Code that depends on family and layout: biases over replicas; sinks, delta nets and growing queries over
segment shares."""
SERVED = ("qwen3_next",)
"""The family whose engine CI starts: with delta nets and experts."""
LONG = [
    dataclasses.replace(request, request_id=f"{number}.0")
    for number, request in enumerate(driving.requests(6, length=100, max_tokens=40, seed=3, ignore_stop=True))
]
"""Prompts of two chunks of the delta rule, split if a step takes 128 tokens."""


def has_experts(family: str) -> bool:
    return "num_experts_per_tok" in FAMILIES[family][1]


def cases() -> Iterator[Any]:
    """Yield each family on one rank and cut along all of its axes, and the layouts of SHORT and MORE."""
    for family in FAMILIES:
        cut = "tp2-pp2-ep2" if has_experts(family) else "tp2-pp2"
        wanted = {"one", *SHORT.get(family, ()), *MORE.get(family, ())}
        if family not in SAME_TENSORS:
            wanted.add(cut)
        for layout in LAYOUTS:
            if layout in wanted:
                marks = () if layout in SHORT.get(family, ()) else pytest.mark.slow
                yield pytest.param(family, layout, marks=marks, id=f"{family}-{layout}")


@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_trains_as_transformers_computes(family, layout, one_rank_of, tmp_path) -> None:
    """Compare log-probs, gradient norms over layouts, and the exports before and after training."""
    if layout != "one":
        check_family(family, LAYOUTS[layout], one_rank_of, tmp_path)
        return
    folder, result = one_rank_of.of(family)
    check_forward([result], folder)
    losses = [metrics["loss"] for metrics in result["metrics"]]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("family", SERVED)
def test_serves_what_a_planned_weight_sync_brought(family: str, tmp_path: Path) -> None:
    """Sync an engine of dummy weights: no whole tensors, equal plans, and transformers' log-probs."""
    folder = write_model(tmp_path / family, family, served=True)
    with engine(folder, real_weights=False) as host, synced(host, folder) as (trainer, feeder, plan):
        assert planned_session(host, trainer, feeder, plan) == []
        require_log_probs(folder, host.call(driving.generate, ASKED))
        if has_delta_nets(folder):  # their states are carried over parts of a prompt, and over pauses
            responses = host.call(driving.in_segments, LONG, 9)
            assert driving.worst_gap(folder, LONG, responses) < 1e-4
        assert host.call(driving.lost_asleep) == [], "after it slept on a GPU"


def has_delta_nets(folder: Path) -> bool:
    return "linear_num_key_heads" in read_config(folder)


def require_log_probs(folder: Path, responses: list[Completion]) -> None:
    """Check log-probs against transformers', and with experts the routes of all positions."""
    # transformers' own float32 is 1e-4 off float64 with delta nets of these widths, and 4e-6 without
    bound = 5e-5 if has_delta_nets(folder) else 1e-5
    assert driving.worst_gap(folder, ASKED, responses) < bound
    for request, response in zip(ASKED, responses, strict=True):
        require_routes(request, response, folder)


def require_routes(request: GenerationRequest, response: Completion, folder: Path) -> None:
    """Check for distinct experts at each position but the last, in each layer with experts."""
    hf = read_config(folder)
    with_experts = [n for n in range(hf["num_hidden_layers"]) if family_of(hf).is_moe_layer(hf, n)]
    assert (response.routes is None) == (not with_experts)
    if response.routes is not None:
        assert response.routes.missing == 0
        rows = np.sort(response.routes.layers(list(range(len(with_experts)))), axis=2)
        assert len(rows) == len(request.prompt_tokens) + len(response.tokens) - 1
        assert (np.diff(rows.astype(int), axis=2) > 0).all() and len(np.unique(rows)) > rows.shape[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_syncs_give_what_an_engine_reads_itself(family: str, tmp_path: Path) -> None:
    """Sync another model and back, by boxes and whole: log-probs match transformers', then the first ones."""
    folder, other = (write_model(tmp_path / str(n), family, served=True, seed=n) for n in (0, 9))
    with engine(folder, real_weights=True) as host, synced(host, folder) as (trainer, feeder, plan):
        read_itself = host.call(driving.generate, ASKED)
        require_log_probs(folder, read_itself)
        host.call(begin_at_no_version)
        for source in (other, folder):
            trainer.set(list(read(source).values()))
            assert planned_session(host, trainer, feeder, plan) == []
            responses = host.call(driving.generate, ASKED)
            require_log_probs(source, responses)
        assert log_probs(responses) == log_probs(read_itself)
        if not stacks(folder):
            for source in (other, folder):
                assert not sync_weights(host, feeder, source).errors
            assert log_probs(host.call(driving.generate, ASKED)) == log_probs(read_itself)
        assert host.call(driving.lost_asleep) == [], "after it slept on a GPU"


def begin_at_no_version(engine: RolloutEngine) -> None:
    """Have the engine, whose loaded weights are version 0, request its workers' first session."""
    engine.policy_version = -1


@contextlib.contextmanager
def engine(folder: Path, *, real_weights: bool) -> Iterator[EngineHost]:
    routes = "num_experts_per_tok" in read_config(folder)
    arguments = {"real_weights": real_weights, "sync": SYNC, "routes": routes}
    host = host_of(folder, engine=arguments, max_num_batched_tokens=128)
    try:
        yield host
    finally:
        host.close()


@contextlib.contextmanager
def synced(host: EngineHost, folder: Path) -> Iterator[tuple[LeasedRank, Feeder, Any]]:
    """Yield a trainer rank with the folder's weights, the engine's feeder, and their plan."""
    (tensors,) = spread(read(folder), 1)
    needed = described(host, folder)
    hf = read_config(folder)
    (expected,) = engine_manifests.engine_rank_manifests(hf, Layout(), dtype="float32")
    assert boxes(expected) == boxes(needed[0])
    plan = build_plan(
        [RankManifest.of(0, tensors)], needed, Topology.shared(1), PlanOptions(bucket_bytes=64 << 10)
    )
    assert not plan.whole_tensors
    feeder = Feeder(host.call(driving.addresses), SYNC, full=True)
    trainer = LeasedRank(tensors, list(read(folder).values()))
    try:
        yield trainer, feeder, plan
    finally:
        host.call(driving.release)
        feeder.close()
        trainer.close()


def boxes(manifest: RankManifest) -> dict[str, Any]:
    """Return parameters by name, with their boxes in order of position."""
    return {
        t.name: (t.shape, t.dtype, sorted(t.pieces, key=lambda p: p.local_start)) for t in manifest.tensors
    }


def log_probs(responses: list[Completion]) -> list[list[float]]:
    return [response.logprobs.tolist() for response in responses]
