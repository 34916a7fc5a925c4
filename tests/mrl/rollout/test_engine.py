"""The rollout engine on real vLLM: what it refuses and returns; log-probs are the model's own."""

from pathlib import Path

import numpy as np
import pytest

from mrl.errors import RolloutError
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import GenerationRequest
from mrl.rollout.seeds import sample_seed
from mrl.samples import Status
from tests.engines import ENGINE_SHAPE, EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.versions import synced
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration


def test_log_probs_are_those_of_transformers(serving: EngineHost, tiny_model: Path) -> None:
    requests = driving.requests(24, ignore_stop=True)
    answers = serving.call(driving.generate, requests)
    assert all(len(a.tokens) == len(a.logprobs) == len(a.policy_versions) == 8 for a in answers)
    assert driving.worst_gap(tiny_model, requests, answers) < 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_log_probs_are_of_the_distribution_sampled_from(
    serving: EngineHost, tiny_model: Path, temperature: float
) -> None:
    requests = driving.requests(8, seed=3, temperature=temperature, ignore_stop=True)
    assert driving.worst_gap(tiny_model, requests, serving.call(driving.generate, requests)) < 1e-4


def test_greedy_takes_the_most_probable_token(serving: EngineHost, tiny_model: Path) -> None:
    requests = driving.requests(6, seed=4, greedy=True, ignore_stop=True)
    answers = serving.call(driving.generate, requests)
    assert driving.worst_gap(tiny_model, requests, answers) < 1e-4
    again = serving.call(driving.generate, driving.requests(6, seed=4, greedy=True, ignore_stop=True))
    assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in again]


def test_samples_of_one_prompt_differ_and_a_seed_repeats(serving: EngineHost) -> None:
    prompt = np.arange(2, 10, dtype=np.int32)
    requests = [
        GenerationRequest(f"0.{i}", prompt, sample_seed(5, 0, i), 12, ignore_stop=True) for i in range(32)
    ]
    first = [a.tokens.tolist() for a in serving.call(driving.generate, requests)]
    assert len({tuple(t) for t in first}) == 32
    assert [a.tokens.tolist() for a in serving.call(driving.generate, requests)] == first


def test_statuses_say_how_it_ended(serving: EngineHost) -> None:
    """Every token of the vocabulary stops: the first one ends the response and is part of it."""
    stopping = driving.requests(3, seed=6, stop_token_ids=tuple(range(131)))
    answers = serving.call(driving.generate, stopping)
    assert [a.status for a in answers] == [Status.FINISHED] * 3 and all(len(a.tokens) == 1 for a in answers)
    answers = serving.call(driving.generate, driving.requests(3, seed=7, max_tokens=2, ignore_stop=True))
    assert [a.status for a in answers] == [Status.TRUNCATED] * 3
    answers = serving.call(
        driving.generate, driving.requests(3, seed=8, max_tokens=150, ignore_stop=True), 0.0
    )
    assert [a.status for a in answers] == [Status.ABORTED] * 3


def submit_step_abort(
    engine: RolloutEngine, requests: list[GenerationRequest]
) -> tuple[list[tuple[str, int]], int]:
    engine.submit(requests[:2])
    engine.step()
    engine.submit(requests[2:])
    engine.abort([requests[0].request_id, requests[3].request_id, "unknown"])
    ended: list[tuple[str, int]] = []
    while engine.has_work:
        ended += [(r.request_id, len(r.tokens)) for r in engine.step()]
    return sorted(ended), engine._engine.get_num_unfinished_requests()


def test_requests_come_and_go_while_others_run(serving: EngineHost) -> None:
    """Nothing comes of two aborted requests, one running and one waiting; their names are free again."""
    requests = driving.requests(4, seed=9, max_tokens=20, ignore_stop=True)
    for _ in range(2):
        ended, unfinished = serving.call(submit_step_abort, requests)
        assert ended == [(r.request_id, 20) for r in requests[1:3]] and unfinished == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_tokens": np.zeros(0, np.int32)}, "prompt of 0"),
        ({"prompt_tokens": np.ones(159, np.int32)}, "at most model.max_length = 160"),
        ({"max_tokens": 0}, "0 new tokens"),
    ],
)
def test_what_cannot_run_is_refused_by_name(serving: EngineHost, fields: dict, reason: str) -> None:
    request = GenerationRequest(
        **({"request_id": "7.0", "prompt_tokens": np.ones(4, np.int32), "seed": 1, "max_tokens": 4} | fields)
    )
    with pytest.raises(RolloutError, match=rf"request 7\.0: .*{reason}"):
        serving.call(driving.generate, [request])


def twice(engine: RolloutEngine, requests: list[GenerationRequest]) -> None:
    try:
        engine.submit([*requests, *requests])
    finally:
        engine.abort([r.request_id for r in requests])


def test_a_name_is_of_one_request_at_a_time(serving: EngineHost) -> None:
    with pytest.raises(RolloutError, match=r"request 10\.0 is already running on engine 0"):
        serving.call(twice, driving.requests(1, seed=10))


def sync_while_busy(engine: RolloutEngine, requests: list[GenerationRequest]) -> None:
    from mrl.resharding.transfer.session import Session

    engine.submit(requests)
    engine.step()
    try:
        engine.receive(Session.new(engine.policy_version, engine.policy_version + 1, "d"))
    finally:
        engine.abort([r.request_id for r in requests])


def test_a_weight_sync_waits_for_no_request(serving: EngineHost) -> None:
    with pytest.raises(RolloutError, match="2 running requests; pause it"):
        serving.call(sync_while_busy, driving.requests(2, seed=10))
    assert len(serving.call(driving.generate, driving.requests(2, seed=11))) == 2


def test_a_new_version_forgets_the_old_ones_prefixes(
    serving: EngineHost, tiny_model: Path, tmp_path: Path
) -> None:
    """Prompts span several KV blocks: a block kept from the old weights would show in the log-probs."""
    requests = driving.requests(4, seed=12, length=140, ignore_stop=True)
    before = serving.call(driving.generate, requests)
    assert driving.worst_gap(tiny_model, requests, before) < 1e-4
    other = write_model(tmp_path / "other", **ENGINE_SHAPE, seed=5)
    for folder in (other, tiny_model):
        synced(serving, [folder])
        after = serving.call(driving.generate, requests)
        assert driving.worst_gap(folder, requests, after) < 1e-4
        assert {int(v) for a in after for v in a.policy_versions} == {serving.call(driving.version)}
    assert [a.logprobs.tolist() for a in after] == [a.logprobs.tolist() for a in before]
