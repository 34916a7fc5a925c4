"""Weight syncs into real vLLM modules: after an error the engine serves nothing; a resend heals exactly."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mrl.errors import RolloutError, WeightSyncError
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.session import Session
from mrl.rollout.engine import RolloutEngine
from tests.engines import ENGINE_SHAPE, EngineHost, host_of
from tests.mrl.rollout import driving
from tests.ranks import run_ranks
from tests.resharding.feeding import Feeder, read
from tests.resharding.footprint import Footprint, require_no_leak
from tests.resharding.leasing import LeasedRank, one_trainer_rank, spread
from tests.resharding.vllm.sessions import ASKED, SYNC, described, planned_session, sync_weights
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration


@pytest.fixture
def feeder(tiny_engine: EngineHost) -> Iterator[Feeder]:
    end = Feeder(tiny_engine.call(driving.addresses), SYNC)
    yield end
    tiny_engine.call(driving.release)
    end.close()


@pytest.fixture(scope="module")
def fresh_answers(tiny_model: Path) -> list[list[float]]:
    """Return log-probs of another engine that read the folder and had no weight sync."""
    host = host_of(tiny_model, engine={"real_weights": True})
    answers = host.call(driving.generate, ASKED)
    host.close()
    return [a.logprobs.tolist() for a in answers]


def direct_modules(engine: RolloutEngine) -> list[str]:
    """Return modules that a plan would write in place; the model is then restored."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    from mrl.resharding.vllm import in_place, modules

    def look(worker: Any) -> list[str]:
        model = worker.model_runner.model
        initialize_layerwise_reload(model)
        holding = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        direct = [name for name in holding if in_place.is_direct(model.get_submodule(name))]
        modules.put_back(model)
        return direct

    return engine._engine.collective_rpc(look)[0]


def test_only_what_vllm_packs_elsewhere_is_staged(tiny_engine, tiny_model, feeder, fresh_answers) -> None:
    sync_weights(tiny_engine, feeder, tiny_model)
    direct = set(tiny_engine.call(direct_modules))
    assert {
        "model.embed_tokens",
        "lm_head",
        "model.norm",
        "model.layers.3.mlp.experts.routed_experts",
    } <= direct
    assert not [name for name in direct if name.endswith(("qkv_proj", "o_proj"))]
    assert [a.logprobs.tolist() for a in tiny_engine.call(driving.generate, ASKED)] == fresh_answers


def break_loading(engine: RolloutEngine, where: str) -> None:
    """Make the loader raise once: at its first, middle or last tensor, or between a module's tensors."""
    from mrl.resharding.vllm.modules import PlanLoader

    load, seen = PlanLoader._load, []

    def failing(self: Any, tensors: list) -> None:
        for name, tensor in tensors:
            seen.append(name)
            inside = where == "module" and name.endswith("layers.2.self_attn.k_proj.weight")
            if inside or len(seen) == {"first": 1, "middle": 55, "last": 109}.get(where, -1):
                PlanLoader._load = load
                raise RuntimeError(f"broken on purpose at {where} ({name})")
            load(self, [(name, tensor)])

    PlanLoader._load = failing


def break_finish(engine: RolloutEngine) -> None:
    from mrl.resharding.vllm import in_place

    pack = in_place.pack_experts

    def failing(module: Any) -> None:
        in_place.pack_experts = pack
        raise RuntimeError("broken on purpose at finish")

    in_place.pack_experts = failing


@pytest.mark.parametrize("where", ["first", "module", "middle", "last", "finish"])
def test_after_an_error_nothing_is_served_and_a_resend_heals_to_the_last_bit(
    tiny_engine: EngineHost, tiny_model: Path, tmp_path: Path, feeder: Feeder, fresh_answers: list, where: str
) -> None:
    """The broken session has other weights, so that any remainder would show."""
    sync_weights(tiny_engine, feeder, tiny_model)
    version = tiny_engine.call(driving.version)
    other = write_model(tmp_path / "other", **ENGINE_SHAPE, seed=9)
    if where == "finish":
        tiny_engine.call(break_finish)
    else:
        tiny_engine.call(break_loading, where)
    with pytest.raises(WeightSyncError, match=f"broken on purpose at {where}"):
        sync_weights(tiny_engine, feeder, other)
    assert tiny_engine.call(driving.version) == version
    with pytest.raises(RolloutError, match=f"serves nothing.*\n(.*\n)*.*broken on purpose at {where}"):
        tiny_engine.call(driving.generate, ASKED)
    assert not sync_weights(tiny_engine, feeder, tiny_model).errors
    assert [a.logprobs.tolist() for a in tiny_engine.call(driving.generate, ASKED)] == fresh_answers


@pytest.mark.parametrize(
    "drop",
    [
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.3.mlp.experts.5.up_proj.weight",
        "lm_head.weight",
    ],
)
def test_a_manifest_without_a_parameter_never_commits(tiny_engine, tiny_model, feeder, drop) -> None:
    with pytest.raises(WeightSyncError, match="vLLM did not load everything"):
        sync_weights(tiny_engine, feeder, tiny_model, drop=drop)
    assert not sync_weights(tiny_engine, feeder, tiny_model).errors


def test_a_stale_session_is_refused_and_the_engine_goes_on(tiny_engine, tiny_model, feeder) -> None:
    sync_weights(tiny_engine, feeder, tiny_model)
    version = tiny_engine.call(driving.version)
    stale = feeder.session(read(tiny_model), version - 1, version)
    with pytest.raises(WeightSyncError, match=f"committed version {version}"):
        tiny_engine.call(driving.receive, stale)
    assert len(tiny_engine.call(driving.generate, ASKED)) == len(ASKED)


@pytest.mark.parametrize("sessions", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_many_sessions_leave_the_engines_process_as_it_was(
    tiny_engine: EngineHost, tiny_model: Path, feeder: Feeder, fresh_answers: list, sessions: int
) -> None:
    for _ in range(5):
        assert not sync_weights(tiny_engine, feeder, tiny_model).errors
    marks = [tiny_engine.call(footprint)]
    for part in np.array_split(range(sessions), 4):
        for _ in part:
            assert not sync_weights(tiny_engine, feeder, tiny_model).errors
        marks.append(tiny_engine.call(footprint))
    require_no_leak(marks)
    assert [a.logprobs.tolist() for a in tiny_engine.call(driving.generate, ASKED)] == fresh_answers


def footprint(engine: RolloutEngine) -> Footprint:
    return Footprint.now()


def break_processing(engine: RolloutEngine, number: int) -> None:
    """Make the number-th module processed under a plan raise once, midway through the model."""
    from mrl.resharding.vllm import modules

    process, seen = modules._layerwise_process, []

    def failing(module: Any, info: Any) -> None:
        seen.append(module)
        if len(seen) == number:
            modules._layerwise_process = process
            raise RuntimeError("broken on purpose at a module")
        process(module, info)

    modules._layerwise_process = failing


def test_a_planned_weight_sync_gives_what_a_fresh_engine_has(
    tiny_engine: EngineHost, tiny_model: Path, tmp_path: Path, feeder: Feeder, fresh_answers: list
) -> None:
    """Other weights first, with an error midway, then the folder's: equal to the last bit."""
    other = write_model(tmp_path / "other", **ENGINE_SHAPE, seed=11)
    weights = read(tiny_model)
    (tensors,) = spread(weights, 1)
    plan = build_plan(
        [RankManifest.of(0, tensors)],
        described(tiny_engine, tiny_model),
        Topology.shared(1),
        PlanOptions(bucket_bytes=64 << 10),
    )
    trainer = LeasedRank(tensors, list(read(other).values()))

    assert planned_session(tiny_engine, trainer, feeder, plan) == []
    assert driving.worst_gap(other, ASKED, tiny_engine.call(driving.generate, ASKED)) < 1e-4
    trainer.set([weights[t.name] for t in tensors])
    tiny_engine.call(break_processing, 7)
    with pytest.raises(WeightSyncError, match="broken on purpose at a module"):
        planned_session(tiny_engine, trainer, feeder, plan)
    with pytest.raises(RolloutError, match="serves nothing"):
        tiny_engine.call(driving.generate, ASKED)
    assert planned_session(tiny_engine, trainer, feeder, plan) == []
    assert [a.logprobs.tolist() for a in tiny_engine.call(driving.generate, ASKED)] == fresh_answers
    trainer.close()


def receive_asleep(engine: RolloutEngine, session: Session, tag: str) -> None:
    """Run a weight sync while part of the engine's memory is given away, as `sleep` records it."""
    engine._awake.discard(tag)
    try:
        engine.receive(session)
    finally:
        engine._awake.add(tag)


def generate_asleep(engine: RolloutEngine, tag: str) -> None:
    engine._awake.discard(tag)
    try:
        driving.generate(engine, ASKED)
    finally:
        engine._awake.add(tag)


def test_a_sleeping_engine_takes_and_serves_nothing_and_goes_on_when_awake(
    tiny_engine: EngineHost, tiny_model: Path, feeder: Feeder
) -> None:
    sync_weights(tiny_engine, feeder, tiny_model)
    version = tiny_engine.call(driving.version)
    session = feeder.session(read(tiny_model), version, version + 1)
    with pytest.raises(RolloutError, match="wake its weights before a weight sync"):
        tiny_engine.call(receive_asleep, session, "weights")
    for tag in ("weights", "kv_cache"):
        with pytest.raises(RolloutError, match=r"is asleep .*wake it first"):
            tiny_engine.call(generate_asleep, tag)
    with pytest.raises(RolloutError, match="wake knows"):
        tiny_engine.call(RolloutEngine.wake, ["weight"])
    assert not sync_weights(tiny_engine, feeder, tiny_model).errors
    assert len(tiny_engine.call(driving.generate, ASKED)) == len(ASKED)


def named_files(engine: RolloutEngine) -> list[Path]:
    return [*engine._scratch.note_segments(), *engine._scratch.folder.glob("vllm_dist_*")]


def sockets() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@mrl-" in line}


def receive_planned(engine: RolloutEngine, session: tuple, both: list[RankManifest], folder: str) -> None:
    """Receive from `one_trainer_rank`; the same plan has the same digest here."""
    ranks = spread(read(Path(folder)), 2)
    plan = build_plan(
        [RankManifest.of(r, t) for r, t in enumerate(ranks)],
        both,
        Topology.shared(2),
        PlanOptions(bucket_bytes=16 << 10),
    )
    engine.receive(Session(*session, plan.digest))


@pytest.fixture
def two_workers(tiny_model: Path) -> Iterator[EngineHost]:
    patient = SYNC.model_copy(update={"deadline_seconds": 400.0})  # while trainer ranks make their imports
    host = host_of(tiny_model, engine={"sync": patient}, tp=2, enforce_eager=False)
    yield host
    host.close()


def test_two_workers_serve_the_same_and_die_with_their_owner(two_workers, tiny_model, tmp_path) -> None:
    host = two_workers
    with pytest.raises(RolloutError, match="never received weights"):
        host.call(driving.generate, ASKED)
    feeder = Feeder(host.call(driving.addresses), SYNC)
    assert len(feeder.senders) == 2
    assert not sync_weights(host, feeder, tiny_model).errors
    assert driving.worst_gap(tiny_model, ASKED, host.call(driving.generate, ASKED)) < 1e-4

    plan_session = ("1" * 32, 0, 1)
    run = threading.Thread(
        target=lambda: sent.extend(run_ranks(one_trainer_rank, 2, str(other), *arguments, seconds=400))
    )
    other, sent = write_model(tmp_path / "other", **ENGINE_SHAPE, seed=12), []
    both = [RankManifest.of(i, m.tensors) for i, m in enumerate(described(host, tiny_model))]
    arguments = (host.call(driving.addresses), both, plan_session)
    run.start()
    host.call(receive_planned, plan_session, both, str(other), seconds=450)
    run.join(450)
    assert len(sent) == 2 and driving.worst_gap(other, ASKED, host.call(driving.generate, ASKED)) < 1e-4

    named = host.call(named_files)
    assert {p.name[:4] for p in named} == {"psm_", "vllm"} and all(p.exists() for p in named)
    weights = read(tiny_model)
    session = feeder.session(weights, 1, 2)
    host.start(driving.receive, session)  # killed while both workers wait inside the weight sync
    time.sleep(1.0)
    family = host.kill()
    assert sum("python" in p.name() or "VLLM" in p.name() for p in family if p.is_running()) >= 2
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"survivors: {[(p.pid, p.cmdline()) for p in alive]}"
    feeder.close()
    deadline = time.monotonic() + 60
    while (left := [p for p in named if p.exists()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left and not {a for a in sockets() if any(f"@mrl-{p.pid}-" in a for p in family)}
