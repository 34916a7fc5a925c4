"""An engine of two dp ranks on real vLLM: experts are split over both; requests and KV cache are per rank."""

import asyncio
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError, PeerLost
from mrl.rollout import vllm_start
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.engine_process import EngineProcess
from mrl.rollout.request import Completion, GenerationRequest, join_completions, next_request
from mrl.samples import Status
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.pools import SECRET, SEED, PoolHost, comes_true
from tests.support.listeners import listeners
from tests.tiny_models import write_model

DP2 = RolloutSection.model_validate({"dp": 2, **driving.SEVERAL})


class Pair:
    """Both ranks of an engine, each in its own process; their loops are paused until a pool connects."""

    def __init__(self, folder: Path, rollout: RolloutSection) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            meeting = ("127.0.0.1", probe.getsockname()[1])

        def start(dp_rank: int) -> EngineHost:
            return EngineHost(
                secret=SECRET,
                rollout=rollout,
                model_path=str(folder),
                max_length=96,
                seed=SEED,
                part=EngineProcess(dp_rank=dp_rank, dp=2),
                meeting=meeting,
                real_weights=True,
                routes=True,
            )

        with ThreadPoolExecutor(2) as threads:
            self.hosts = list(threads.map(start, range(2)))

    def both(self, function: Any, *shares: list[GenerationRequest]) -> list[Any]:
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
    """Return where the rank has each expert of its last layer, -1 elsewhere."""
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    maps = [m.expert_map for m in runner.model.modules() if getattr(m, "expert_map", None) is not None]
    return maps[-1].tolist()


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
    processes = [psutil.Process(host.process.pid) for host in pair.hosts]
    family = [*processes, *(child for process in processes for child in process.children(recursive=True))]
    heard = [listener for listener in listeners(family) if listener.startswith("SOCK_STREAM")]
    assert heard and not [listener for listener in heard if listener.split()[1] in ("::", "0.0.0.0")]


@pytest.mark.integration
@pytest.mark.parametrize("busy", [0, 1])
def test_an_idle_rank_stalls_nobody(pair: Pair, tiny_model: Path, busy: int) -> None:
    """It never has a request; the next round finds both in step again."""
    share = driving.requests(3, max_tokens=12, seed=2 + busy, ignore_stop=True)
    shares = [share if rank == busy else [] for rank in range(2)]
    answers = pair.both(driving.generate, *shares)
    assert answers[1 - busy] == [] and driving.worst_gap(tiny_model, share, answers[busy]) < 1e-5
    assert pair.both(driving.generate, [], []) == [[], []]


def until_both_pause(
    engine: RolloutEngine, requests: list[GenerationRequest]
) -> tuple[int, list[Completion]]:
    """Ask for a pause after three steps (first rank) or six (second); return steps and snapshot."""
    engine.resume()
    engine.submit(requests)
    steps = 0
    while not (vote := engine.vote(wants_pause=steps >= 3 + 3 * engine.part.dp_rank))[1]:
        assert vote[0] and not engine.step()
        steps += 1
    engine.pause()
    parts = engine.snapshot()
    engine.abort([r.request_id for r in requests])
    return steps, parts


@pytest.mark.integration
def test_both_pause_at_one_step_and_requests_continue_at_the_other(pair: Pair, tiny_model: Path) -> None:
    """Also if one has fewer; their routes are those of the whole."""
    shares = (
        driving.requests(4, max_tokens=20, seed=7, ignore_stop=True),
        driving.requests(1, max_tokens=9, seed=8, ignore_stop=True),
    )
    results = pair.both(until_both_pause, *shares)
    assert [steps for steps, _ in results] == [6, 6]
    continuing = []
    for share, (_, parts) in zip(shares, results, strict=True):
        assert [(p.status, len(p.tokens)) for p in parts] == [(Status.INTERRUPTED, 6)] * len(share)
        continuing.append([next_request(r, p, SEED) for r, p in zip(share, parts, strict=True)])
    remaining = pair.both(driving.generate, continuing[1], continuing[0])[::-1]
    for share, (_, parts), ended in zip(shares, results, remaining, strict=True):
        complete = [join_completions(part, continued) for part, continued in zip(parts, ended, strict=True)]
        assert [len(c.tokens) for c in complete] == [r.max_tokens for r in share]
        assert driving.worst_gap(tiny_model, share, complete) < 1e-5
        assert driving.share_of_own_routes(tiny_model, share, complete) > 0.99


def num_steps(engine: RolloutEngine) -> int:
    return threading.current_thread().num_steps  # type: ignore[attr-defined]


@pytest.mark.integration
def test_ranks_pause_together_whenever_each_is_told_and_one_says_that_its_peer_is_gone(
    pair: Pair, tiny_model: Path
) -> None:
    """The last test of this pair. In every other round the second rank is idle."""
    both, rng = PoolHost(pair.hosts, by_index=True), random.Random(2)
    pool = both.pool
    all_requests = driving.requests(8, max_tokens=60, seed=20, ignore_stop=True)
    all_requests += driving.requests(3, max_tokens=40, seed=21, ignore_stop=True)

    async def told(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await pool._clients[number].pause(snapshot=False)

    async def main() -> None:
        pool.resume()
        for requests in (all_requests, all_requests[:8]):
            async with both.generating(requests) as tasks:
                pauses = 0
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(rng.uniform(0.0, 0.2))
                    await asyncio.gather(told(0, rng.uniform(0.0, 0.1)), told(1, rng.uniform(0.0, 0.1)))
                    steps = {host.call(num_steps) for host in pair.hosts}
                    assert len(steps) == 1, "they stopped at one step"
                    pauses += 1
                    pool.resume()
                assert pauses > 1
            assert driving.worst_gap(tiny_model, requests[:2], [task.result() for task in tasks[:2]]) < 1e-5
        tasks = [asyncio.ensure_future(pool.generate(request)) for request in all_requests[:8]]
        await asyncio.sleep(0.1)
        os.kill(pair.hosts[1].process.pid, signal.SIGKILL)
        await comes_true(lambda: len(both.lost) == 2)
        for task in tasks:
            task.cancel()

    both.run(main())
    ends = {number: (why, kind) for number, why, kind in both.lost}
    assert ends[1][1] == "" and ends[0][1] == "PeerLost"
    assert "engine 0, dp rank 0 could not continue without the other ranks" in ends[0][0]
    both.close()


@pytest.mark.integration
@pytest.mark.slow
def test_latent_attention_and_a_rank_that_is_late(tmp_path: Path) -> None:
    """The second rank is alive but never steps: the first waits for as long as the setting says."""
    folder = write_model(
        tmp_path / "model", "deepseek_v3", hidden_size=64, head_dim=64, moe_intermediate_size=64
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
        with pytest.raises(PeerLost, match=r"(?s)dp rank 0 could not continue.*Timed out"):
            made.hosts[0].result(150)
    finally:
        made.close()


def test_a_process_by_itself_is_no_engine_of_two(tiny_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.dp = 2: only a run's launcher starts .*; set it to 1 here"
    ):
        vllm_start.arguments(DP2, str(tiny_model), max_length=96, seed=1, part=EngineProcess(), meeting=None)
