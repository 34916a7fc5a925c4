"""Responses do not depend on the number of tokens per pass or on the size of the KV cache."""

import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import Completion, GenerationRequest
from tests.engines import ENGINE_SHAPE, EngineHost
from tests.mrl.rollout import driving
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration
NARROW = {"max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 20}
"""64 tokens per pass, and a KV cache of four blocks of 128 tokens (eight with tp 2)."""
ASKED = {
    "together longer than a pass": driving.requests(32, seed=1, length=40, ignore_stop=True),
    "each longer than a pass": driving.requests(6, seed=2, length=200, ignore_stop=True),
    "outgrowing the cache": driving.requests(16, seed=3, length=110, max_tokens=40, ignore_stop=True),
}


def engine(model: Path, **rollout: Any) -> EngineHost:
    settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_bytes": 64 << 20, "max_num_seqs": 64}
    return EngineHost(
        rollout=RolloutSection(**(settings | rollout)),
        model_path=str(model),
        max_length=256,
        seed=1,
        real_weights=True,
    )


def generate_and_count(
    engine: RolloutEngine, requests: list[GenerationRequest]
) -> tuple[list[Completion], int, int]:
    """Return the ordered responses, the number of half-computed prompts between steps, and of preemptions."""
    scheduler: Any = engine._engine.engine_core.engine_core.scheduler
    finished: list[Completion] = []
    preemptions: dict[str, int] = {}
    split = 0
    engine.submit(requests)
    while engine.has_work:
        finished += engine.step()
        for request in scheduler.requests.values():
            preemptions[request.request_id] = request.num_preemptions
            split += 0 < request.num_computed_tokens < request.num_prompt_tokens
    return driving.whole(requests, finished), split, sum(preemptions.values())


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[Completion]]:
    """Return the responses of an engine that computes each prompt in one pass and preempts nothing."""
    host = engine(tiny_model)
    answers = {name: host.call(generate_and_count, requests) for name, requests in ASKED.items()}
    host.close()
    assert all(split == preempted == 0 for _, split, preempted in answers.values())
    return {name: responses for name, (responses, _, _) in answers.items()}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def narrow(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[EngineHost]:
    host = engine(tiny_model, tp=request.param, **NARROW)
    yield host
    host.close()


@pytest.mark.parametrize("case", ASKED)
def test_a_split_or_preempted_prompt_has_the_tokens_of_a_whole_one(
    narrow: EngineHost, expected: dict[str, list[Completion]], case: str
) -> None:
    """Log-probs agree to rounding only, as a product with other rows rounds differently."""
    responses, split, preempted = narrow.call(generate_and_count, ASKED[case])
    assert split and (preempted > 0) == (case == "outgrowing the cache")
    assert [r.tokens.tolist() for r in responses] == [r.tokens.tolist() for r in expected[case]]
    for response, whole in zip(responses, expected[case], strict=True):
        assert abs(response.logprobs - whole.logprobs).max() < 1e-5


@pytest.mark.parametrize(
    "narrow", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"], indirect=True
)
@pytest.mark.parametrize("case", ["each longer than a pass", "outgrowing the cache"])
def test_requests_that_continue_are_computed_as_whole_ones(
    narrow: EngineHost, tiny_model: Path, case: str
) -> None:
    """Tokens before a pause become prompt: split over passes, preempted, with a new random stream."""
    requests = [dataclasses.replace(r, max_tokens=24) for r in ASKED[case]]
    answers = narrow.call(driving.in_segments, requests, 7)
    assert all(
        len(a.tokens) == r.max_tokens and len(a.segments) > 1 for a, r in zip(answers, requests, strict=True)
    )
    assert driving.worst_gap(tiny_model, requests, answers) < 1e-4


@pytest.mark.slow
def test_a_request_of_three_thousand_tokens_continues(tmp_path: Path) -> None:
    model = write_model(tmp_path / "long", **ENGINE_SHAPE, max_position_embeddings=4096)
    host = EngineHost(
        rollout=RolloutSection(
            dtype="float32", enforce_eager=True, kv_cache_bytes=64 << 20, max_num_batched_tokens=2048
        ),
        model_path=str(model),
        max_length=4096,
        seed=1,
        real_weights=True,
    )
    requests = driving.requests(3, length=3000, max_tokens=30, ignore_stop=True)
    answers = host.call(driving.in_segments, requests, 12)
    host.close()
    assert all(len(a.tokens) == 30 and len(a.segments) > 1 for a in answers)
    assert driving.worst_gap(model, requests, answers) < 1e-4


def generate_with_vllms_own_worker(engine: RolloutEngine, requests: list[GenerationRequest]) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    worker: Any = engine._engine.model_executor.driver_worker.worker
    worker.sample_tokens = types.MethodType(CPUWorker.sample_tokens, worker)
    driving.generate(engine, requests)


@pytest.mark.parametrize("narrow", [1], ids=["tp1"], indirect=True)
def test_vllms_own_worker_still_needs_ours(narrow: EngineHost) -> None:
    """If this fails, mrl/cpu/vllm_worker.py can go. It breaks the engine: the last test of it."""
    with pytest.raises(RuntimeError, match="does not use offset"):
        narrow.call(generate_with_vllms_own_worker, ASKED["each longer than a pass"])
