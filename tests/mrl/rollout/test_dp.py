"""An engine of two dp ranks on real vLLM: whole experts dealt out over both, requests and KV cache of its own on each."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError, PeerLost, RolloutError
from mrl.rollout import vllm_start
from mrl.rollout.drafts import Drafts
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.part import Part
from mrl.rollout.request import GenerationRequest, Response
from mrl.samples import Status
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.support.listeners import listeners
from tests.tiny_models import write_model

DP2 = RolloutSection.model_validate({"dp": 2, **driving.SEVERAL})


class Pair:
    """Both ranks of an engine, each in a process of its own, with a folder's weights."""

    def __init__(self, folder: Path, rollout: RolloutSection) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            meeting = ("127.0.0.1", probe.getsockname()[1])

        def start(dp_rank: int) -> EngineHost:
            return EngineHost(
                rollout=rollout,
                model_path=str(folder),
                max_length=96,
                seed=1,
                part=Part(dp_rank=dp_rank, dp=2),
                meeting=meeting,
                real_weights=True,
                routes=True,
            )

        with ThreadPoolExecutor(2) as threads:
            self.hosts = list(threads.map(start, range(2)))

    def both(self, function: Any, *shares: list[GenerationRequest]) -> list[Any]:
        """The same call of both ranks, each with its share."""
        for host, share in zip(self.hosts, shares, strict=True):
            host.start(function, share)
        return [host.result() for host in self.hosts]

    def close(self) -> None:
        for host in self.hosts:
            host.close()


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Pair]:
    made = Pair(tiny_model, DP2)
    yield made
    made.close()


def own_experts(engine: RolloutEngine) -> list[int]:
    """Where the rank has each expert of its last layer, -1 elsewhere."""
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    maps = [m.expert_map for m in runner.model.modules() if getattr(m, "expert_map", None) is not None]
    return maps[-1].tolist()


def fifteen_steps(engine: RolloutEngine, requests: list[GenerationRequest]) -> list[Response]:
    """As the driver asks: a share, some steps, what finished."""
    engine.submit(requests)
    return engine.step(15)


@pytest.mark.integration
def test_ranks_with_uneven_requests_give_the_models_log_probs(pair: Pair, tiny_model: Path) -> None:
    first, second = pair.hosts[0].call(own_experts), pair.hosts[1].call(own_experts)
    assert [place < 0 for place in first] == [place >= 0 for place in second]
    shares = (
        driving.requests(5, length=17, max_tokens=24, ignore_stop=True),
        driving.requests(2, length=5, max_tokens=9, seed=1, ignore_stop=True),
    )
    for share, answers in zip(shares, pair.both(driving.generate, *shares), strict=True):
        assert [len(a.tokens) for a in answers] == [r.max_tokens for r in share]
        assert driving.worst_gap(tiny_model, share, answers) < 1e-5
        assert driving.share_of_own_routes(tiny_model, share, answers) > 0.99


@pytest.mark.integration
def test_ranks_of_one_machine_meet_where_no_other_one_gets_to(pair: Pair) -> None:
    own = [psutil.Process(host.process.pid) for host in pair.hosts]
    family = [*own, *(child for process in own for child in process.children(recursive=True))]
    heard = [each for each in listeners(family) if each.startswith("SOCK_STREAM")]
    assert heard and not [each for each in heard if each.split()[1] in ("::", "0.0.0.0")]


@pytest.mark.integration
@pytest.mark.parametrize("busy", [0, 1])
def test_an_idle_rank_stalls_nobody(pair: Pair, tiny_model: Path, busy: int) -> None:
    """It has no request from the first step to the last; the next round finds both in step again."""
    share = driving.requests(3, max_tokens=12, seed=2 + busy, ignore_stop=True)
    shares = [share if rank == busy else [] for rank in range(2)]
    answers = pair.both(fifteen_steps, *shares)
    assert answers[1 - busy] == [] and len(answers[busy]) == 3
    assert driving.worst_gap(tiny_model, share, sorted(answers[busy], key=lambda a: a.request_id)) < 1e-5
    assert pair.both(fifteen_steps, [], []) == [[], []]


def two_steps_and_more(engine: RolloutEngine, requests: list[GenerationRequest]) -> int:
    """Ticks of two steps, until another is not wanted; the first rank wants five at most. How many there were."""
    engine.submit(requests)
    engine.step(2)
    ticks = 1
    while engine.goes_on_working(engine.part.dp_rank == 1 or ticks < 5):
        engine.step(2)
        ticks += 1
    return ticks


@pytest.mark.integration
def test_ranks_agree_how_long_a_call_lasts(pair: Pair) -> None:
    """One that wants no more ends it for both, whoever has work; without work it ends too."""
    share = driving.requests(2, max_tokens=16, seed=12, ignore_stop=True)
    assert pair.both(two_steps_and_more, [], share) == [5, 5]
    ticks = pair.both(two_steps_and_more, [], [])
    assert ticks[0] == ticks[1] <= 5, "six tokens are left: three ticks, and where that is seen"
    assert pair.both(two_steps_and_more, [], []) == [1, 1]


@pytest.mark.integration
def test_parked_requests_go_on_at_the_other_rank(pair: Pair, tiny_model: Path) -> None:
    """The second rank could end its own in the ten steps that both have left for it; the first could not, so both park."""
    asked = driving.requests(4, max_tokens=20, seed=7, ignore_stop=True)
    also = driving.requests(1, max_tokens=9, seed=8, ignore_stop=True)
    drafts = Drafts(driving.SEED)
    drafts.ask([*asked, *also])
    parked = [r for share in pair.both(six_steps_and_park, asked, also) for r in share]
    assert [(r.status, len(r.tokens)) for r in parked] == [(Status.PARKED, 6)] * 5
    assert drafts.take(parked) == []
    of_8, of_7 = split(drafts.resubmit())
    whole = {r.request_id: r for rest in pair.both(driving.generate, of_8, of_7) for r in drafts.take(rest)}
    assert {i: len(r.tokens) for i, r in whole.items()} == {
        r.request_id: r.max_tokens for r in [*asked, *also]
    }
    assert driving.worst_gap(tiny_model, asked, [whole[r.request_id] for r in asked]) < 1e-5
    assert driving.share_of_own_routes(tiny_model, asked, [whole[r.request_id] for r in asked]) > 0.99


@pytest.mark.integration
def test_ranks_end_what_so_many_steps_surely_end(pair: Pair) -> None:
    """Also where one of them has nothing to end, and steps with the other."""
    share = driving.requests(3, max_tokens=12, seed=10, ignore_stop=True)
    none, ended = pair.both(six_steps_and_park, [], share)
    assert none == [] and [(r.status, len(r.tokens)) for r in ended] == [(Status.TRUNCATED, 12)] * 3


def split(asked: list[GenerationRequest]) -> tuple[list[GenerationRequest], list[GenerationRequest]]:
    """Those of prompt 8, and the others."""
    return [r for r in asked if r.request_id[0] == "8"], [r for r in asked if r.request_id[0] != "8"]


def six_steps_and_park(engine: RolloutEngine, requests: list[GenerationRequest]) -> list[Response]:
    """And at most ten steps more, where they end all requests of both ranks."""
    return driving.steps_and_park(engine, requests, 6, 10)


@pytest.mark.integration
def test_a_rank_whose_peer_was_killed_says_so_at_once(pair: Pair) -> None:
    """The last test of this pair."""
    with pytest.raises(RolloutError, match="engine 0, dp rank 0 steps together"):
        pair.hosts[0].call(RolloutEngine.poll)
    pair.hosts[0].start(driving.generate, driving.requests(1, max_tokens=9, seed=9))
    pair.hosts[1].kill()
    with pytest.raises(PeerLost, match="engine 0, dp rank 0 could not go on without the other ranks"):
        pair.hosts[0].result(DP2.step_deadline_seconds / 2)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_families_and_a_rank_that_is_late(model_type: str, tmp_path: Path) -> None:
    """The second rank is alive and never steps: the first waits for it as long as the setting says."""
    folder = write_model(
        tmp_path / "model", model_type, hidden_size=64, head_dim=64, moe_intermediate_size=64
    )
    made = Pair(folder, DP2.model_copy(update={"step_deadline_seconds": 60}))
    try:
        shares = (
            driving.requests(3, length=17, max_tokens=16, ignore_stop=True),
            driving.requests(1, length=5, max_tokens=9, seed=1, ignore_stop=True),
        )
        for share, answers in zip(shares, made.both(driving.generate, *shares), strict=True):
            assert driving.worst_gap(folder, share, answers) < 1e-5
        made.hosts[0].start(driving.generate, driving.requests(1, max_tokens=9, seed=9))
        with pytest.raises(PeerLost, match=r"(?s)dp rank 0 could not go on.*Timed out"):
            made.hosts[0].result(150)
    finally:
        made.close()


def test_a_process_by_itself_is_no_engine_of_two(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.dp = 2: .*a run's launcher starts; here set it to 1"):
        vllm_start.arguments(
            DP2,
            str(tiny_model),
            max_length=96,
            seed=1,
            part=Part(),
            meeting=None,
        )
