"""Weight syncs into real vLLM modules of Mixtral and DeepSeek-V3: to the last bit what an engine reads from the folder itself."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.resharding.feeding import Feeder, read
from tests.resharding.leasing import LeasedRank, spread
from tests.resharding.vllm.sessions import ASKED, SYNC, described, planned_session, sync_weights
from tests.tiny_models import write_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SHAPE = {"hidden_size": 64, "head_dim": 64}


@pytest.fixture(params=["mixtral", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / request.param, request.param, **SHAPE)


@contextlib.contextmanager
def engine(folder: Path, *, real_weights: bool) -> Iterator[EngineHost]:
    host = EngineHost(
        rollout=RolloutSection(dtype="float32", enforce_eager=True, kv_cache_bytes=64 << 20, max_num_seqs=64),
        model_path=str(folder),
        max_length=160,
        seed=1,
        real_weights=real_weights,
        sync=SYNC,
    )
    try:
        yield host
    finally:
        host.close()


def answers(host: EngineHost) -> list[list[float]]:
    return [a.logprobs.tolist() for a in host.call(driving.generate, ASKED)]


def test_planned_and_gathered_syncs_give_what_an_engine_reads_itself(folder: Path, tmp_path: Path) -> None:
    with engine(folder, real_weights=True) as host:
        read_itself = answers(host)
    with engine(folder, real_weights=False) as host:
        check_weight_syncs(host, folder, tmp_path, read_itself)


def check_weight_syncs(
    host: EngineHost, folder: Path, tmp_path: Path, read_itself: list[list[float]]
) -> None:
    """Another folder's weights and then the folder's, by the plan and by gathering."""
    other = write_model(tmp_path / "other", folder.name, seed=9, **SHAPE)
    (tensors,) = spread(read(folder), 1)
    plan = build_plan(
        [RankManifest.of(0, tensors)],
        described(host, folder),
        Topology.shared(1),
        PlanOptions(bucket_bytes=64 << 10),
    )
    assert plan.fallback_bytes == 0
    weights, others = read(folder), read(other)
    feeder = Feeder(host.call(driving.addresses), SYNC)
    trainer = LeasedRank(tensors, [others[t.name] for t in tensors])
    try:
        assert planned_session(host, trainer, feeder, plan) == []
        assert driving.worst_gap(other, ASKED, host.call(driving.generate, ASKED)) < 1e-4
        trainer.set([weights[t.name] for t in tensors])
        assert planned_session(host, trainer, feeder, plan) == []
        assert answers(host) == read_itself
        assert not sync_weights(host, feeder, other).errors
        assert not sync_weights(host, feeder, folder).errors
        assert answers(host) == read_itself
    finally:
        host.call(driving.release)
        feeder.close()
        trainer.close()
