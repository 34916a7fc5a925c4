"""Requests that leave the engine and go on: no token lost or doubled, each of the version that its stamp says."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import RolloutError
from mrl.rollout.drafts import Drafts, whole_sample
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import GenerationRequest
from mrl.samples import Prompt, Status
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.versions import asked, folders_of, gaps, in_three_versions, synced

pytestmark = pytest.mark.integration
SEED = driving.SEED


def test_a_parked_request_has_the_tokens_that_it_would_have_had(
    serving: EngineHost, tiny_model: Path
) -> None:
    """Up to the first park nothing differs to the last bit; afterwards another random stream goes on in the same model.
    Of 70 requests the engine runs 64 at a time: six wait in it, and begin where others have ended."""
    requests = asked(70)
    at_once = serving.call(driving.generate, requests)
    first = serving.call(driving.steps_and_park, requests, 9)
    assert [len(r.tokens) for r in first] == [9] * 64 and {r.status for r in first} == {Status.PARKED}
    assert serving.call(driving.steps_and_park, [], 0) == []
    rest = serving.call(driving.steps_and_park, [], 24)
    assert [r.tokens.tolist() for r in rest] == [r.tokens.tolist() for r in at_once[64:]]
    for parked, whole in zip(first, at_once[:64], strict=True):
        assert parked.tokens.tolist() == whole.tokens[: len(parked.tokens)].tolist()
        assert parked.logprobs.tolist() == whole.logprobs[: len(parked.tokens)].tolist()
    whole = serving.call(driving.in_segments, requests, 9)
    assert driving.worst_gap(tiny_model, requests[::9], whole[::9]) < 1e-4
    for request, response in zip(requests, whole, strict=True):
        sample = whole_sample(Prompt(0, request.prompt_tokens, "", None), 0, response)
        assert (response.status, len(response.tokens)) == (Status.TRUNCATED, 24)
        assert [s.start for s in sample.segments] == [0, *(s.end for s in sample.segments[:-1])]
        assert [s.attempt for s in sample.segments] == list(range(len(sample.segments)))
    assert {tuple(s.end for s in r.segments) for r in whole[:64]} == {(9, 18, 24)}
    assert {tuple(a.tokens[9:18]) == tuple(b.tokens[9:18]) for a, b in zip(whole, at_once, strict=True)} == {
        False
    }


def test_responses_that_a_tick_surely_ends_are_not_parked(serving: EngineHost) -> None:
    """They are those that nobody parked, to the last bit; one that may be longer than the tick parks all."""
    requests = asked(70, max_tokens=12)
    at_once = serving.call(driving.generate, requests)
    ended = serving.call(driving.steps_and_park, requests, 3, 9)
    assert [r.request_id for r in ended] == [r.request_id for r in requests[:64]]
    rest = serving.call(driving.steps_and_park, [], 12)
    for ours, theirs in zip([*ended, *rest], at_once, strict=True):
        assert ours.status is Status.TRUNCATED and len(ours.segments) == 1
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    longer = [dataclasses.replace(requests[0], max_tokens=13), *requests[1:9]]
    parked = serving.call(driving.steps_and_park, longer, 3, 9)
    assert {(r.status, len(r.tokens)) for r in parked} == {(Status.PARKED, 3)}


def with_batches_in_flight(engine: RolloutEngine, requests: list[GenerationRequest], steps: int) -> Any:
    """vLLM's batch queue, as asynchronous scheduling has it on GPUs: a step begins a batch and does not wait for it."""
    import collections

    core: Any = engine._engine.engine_core.engine_core
    plain = core.batch_queue, core.batch_queue_size, core.step_fn
    core.batch_queue, core.batch_queue_size = collections.deque(maxlen=2), 2
    core.step_fn = core.step_with_batch_queue
    try:
        engine.submit(requests)
        finished = engine.step(steps)
        in_flight = len(core.batch_queue)
        parked = engine.park()
        return finished, in_flight, parked, len(core.batch_queue), core.is_scheduler_paused()
    finally:
        core.batch_queue, core.batch_queue_size, core.step_fn = plain


@pytest.mark.parametrize("steps", [1, 6, 12])
def test_tokens_of_a_batch_in_flight_are_taken(serving: EngineHost, steps: int) -> None:
    requests = asked(3, max_tokens=6)
    at_once = serving.call(driving.generate, requests)
    finished, in_flight, parked, left, paused = serving.call(with_batches_in_flight, requests, steps)
    assert (left, paused) == (0, False)
    for response in [*finished, *parked]:
        whole = at_once[int(response.request_id.split(".")[0])]
        assert response.tokens.tolist() == whole.tokens[: len(response.tokens)].tolist()
        assert (response.status is Status.PARKED) == (len(response.tokens) < 6)
    lengths = {len(r.tokens) for r in [*finished, *parked]}
    assert len(finished) + len(parked) == 3 and len(lengths) == 1 and in_flight == (steps < 12)
    assert serving.call(driving.generate, requests)[0].tokens.tolist() == at_once[0].tokens.tolist()


def with_another_label(engine: RolloutEngine, requests: list[GenerationRequest]) -> Any:
    engine.submit(requests)
    engine.step(2)
    engine._engine.set_weight_version("99")
    try:
        engine.step(2)
        return engine.park()
    finally:
        engine.abort([r.request_id for r in requests])
        engine.step()
        engine._engine.set_weight_version(str(engine.policy_version))


def test_a_stamp_that_vllm_does_not_bear_out_is_refused(serving: EngineHost) -> None:
    version = serving.call(driving.version)
    with pytest.raises(
        RolloutError, match=rf"4 tokens .* of version {version}, .*\('{version}', 0, 2\), \('99', 2, 4\)"
    ):
        serving.call(with_another_label, asked(1))


def test_each_token_is_of_the_version_on_its_stamp(
    serving: EngineHost, tiny_model: Path, tmp_path: Path
) -> None:
    """Three versions in one response: each log-prob is that of its own version's weights on all tokens before it, and far
    from that of the version before."""
    folders = folders_of(tiny_model, tmp_path)
    requests, whole, first = in_three_versions(serving, folders)
    right, shifted = gaps(requests, whole, folders, first)
    assert right.max() < 1e-4 and shifted.mean() > 10 * right.mean() and shifted.mean() > 0.1


def test_a_weight_sync_among_thousands_of_waiting_requests_ends_and_loses_none(
    serving: EngineHost, tiny_model: Path
) -> None:
    """64 of 2,000 requests run; all are parked for the sync, and each is answered once, by the new version alone unless it had begun."""
    requests, drafts = asked(2000, max_tokens=2), Drafts(SEED)
    version = serving.call(driving.version)
    drafts.ask(requests)
    whole = drafts.take(serving.call(driving.steps_and_park, requests, 1))
    synced(serving, [tiny_model])
    asking = drafts.resubmit()
    while asking:
        whole += drafts.take(serving.call(driving.steps_and_park, asking, 50))
        asking = drafts.resubmit()
    assert sorted(r.request_id for r in whole) == sorted(r.request_id for r in requests)
    versions = [r.policy_versions.tolist() for r in whole]
    assert sorted(map(tuple, versions)) == [(version, version + 1)] * 64 + [(version + 1,) * 2] * 1936


@pytest.mark.slow
def test_a_fresh_engine_of_each_version_says_the_same_of_its_tokens(
    serving: EngineHost, tiny_model: Path, tmp_path: Path
) -> None:
    """One that never had another version, from all tokens before each in one pass."""
    folders = folders_of(tiny_model, tmp_path)
    requests, whole, first = in_three_versions(serving, folders)
    rows = [[*q.prompt_tokens.tolist(), *r.tokens.tolist()] for q, r in zip(requests, whole, strict=True)]
    worst, nearest_other = 0.0, []
    for version, folder in enumerate(folders, first):
        fresh = fresh_engine(folder)
        scored = fresh.call(driving.rescored, rows)
        fresh.close()
        for request, response, said in zip(requests, whole, scored, strict=True):
            gap = abs(said[len(request.prompt_tokens) - 1 :] - response.logprobs)
            own = response.policy_versions == version
            worst = max(worst, float(gap[own].max()))
            nearest_other.append(gap[~own].mean())
    assert worst < 1e-5 and min(nearest_other) > 0.1


def fresh_engine(folder: Path) -> EngineHost:
    """Of a folder's own weights."""
    rollout = RolloutSection(dtype="float32", enforce_eager=True, max_num_seqs=64, kv_cache_bytes=64 << 20)
    return EngineHost(rollout=rollout, model_path=str(folder), max_length=160, seed=1, real_weights=True)
