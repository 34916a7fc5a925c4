"""Requests over pauses: no token is lost or doubled, each has its version, with and without the old cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import RolloutError
from mrl.rollout.engine import PauseReport, RolloutEngine
from mrl.rollout.request import Completion, GenerationRequest, sample_of_completion
from mrl.rollout.seeds import sample_seed
from mrl.samples import Prompt, Status
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.versions import asked, folders_of, gaps, in_three_versions, synced

pytestmark = pytest.mark.integration


def require_whole(request: GenerationRequest, completion: Completion, length: int) -> None:
    """Check that it has all its tokens, in gapless segments."""
    sample = sample_of_completion(Prompt(0, request.prompt_tokens, "", None), 0, completion)
    assert (completion.status, len(completion.tokens)) == (Status.TRUNCATED, length)
    assert [s.start for s in sample.segments] == [0, *(s.end for s in sample.segments[:-1])]
    assert sample.segments[-1].end == length


def paused_twice(
    engine: RolloutEngine, requests: list[GenerationRequest]
) -> tuple[list[Completion], list[int], list[PauseReport], bool]:
    """Return the snapshot after nine steps, vLLM's requests per pause, the pauses' reports, `has_work`."""
    engine.submit(requests)
    for _ in range(9):
        engine.step()
    unfinished, paused = [], []
    for _ in range(2):
        paused.append(engine.pause())
        unfinished.append(engine._engine.get_num_unfinished_requests())
    return engine.snapshot(), unfinished, paused, engine.has_work


def test_a_paused_request_has_the_tokens_that_it_would_have_had(
    serving: EngineHost, tiny_model: Path
) -> None:
    """Equal to the last bit up to the first pause. The engine runs 64 of 70 requests at a time."""
    requests = asked(70)
    at_once = serving.call(driving.generate, requests)
    parts, unfinished, paused, has_work = serving.call(paused_twice, requests)
    assert unfinished == [0, 0] and not has_work and paused == [PauseReport(64, 64 * (8 + 9)), PauseReport()]
    assert [(p.request_id, p.status, len(p.tokens)) for p in parts] == [
        (r.request_id, Status.INTERRUPTED, 9) for r in requests[:64]
    ]
    for part, complete in zip(parts, at_once[:64], strict=True):
        assert part.tokens.tolist() == complete.tokens[:9].tolist()
        assert part.logprobs.tolist() == complete.logprobs[:9].tolist()
    completed = driving.whole(requests, serving.call(driving.steps, [], 60))
    assert [r.tokens.tolist() for r in completed[64:]] == [r.tokens.tolist() for r in at_once[64:]]
    assert [r.tokens[:9].tolist() for r in completed[:64]] == [p.tokens.tolist() for p in parts]

    segmented = serving.call(driving.in_segments, requests, 9)
    assert driving.worst_gap(tiny_model, requests[::9], segmented[::9]) < 1e-4
    for request, completion in zip(requests, segmented, strict=True):
        require_whole(request, completion, 24)
        assert [s.attempt for s in completion.segments] == list(range(len(completion.segments)))
    assert {tuple(s.end for s in r.segments) for r in segmented[:64]} == {(9, 18, 24)}
    same = [tuple(a.tokens[9:18]) == tuple(b.tokens[9:18]) for a, b in zip(segmented, at_once, strict=True)]
    assert not any(same)


def held(
    engine: RolloutEngine, training: list[GenerationRequest], validation: list[GenerationRequest]
) -> Any:
    """Return what ends while only validation runs, submitted before and after a pause; then the rest."""
    engine.submit([*training[:2], validation[0]])
    engine.step()
    engine.pause()
    engine.submit([training[2], validation[1]])
    paused = engine.step(), engine.has_work
    engine.resume(training=False)
    first = [completion for _ in range(50) for completion in engine.step()]
    work = engine.has_work
    return paused, [r.request_id for r in first], work, driving.steps(engine, [], 50)


def test_a_validation_runs_while_training_is_held(serving: EngineHost) -> None:
    training = asked(3, max_tokens=6)
    validation = [
        GenerationRequest(f"-{n}.0", np.full(4, n, np.int32), n, 6, ignore_stop=True) for n in (1, 2)
    ]
    paused, first, work, remaining = serving.call(held, training, validation)
    assert paused == ([], False) and sorted(first) == ["-1.0", "-2.0"] and not work
    assert [len(r.tokens) for r in driving.whole(training, remaining)] == [6] * 3


def with_batches_in_flight(engine: RolloutEngine, requests: list[GenerationRequest], steps: int) -> Any:
    """Use vLLM's batch queue, as asynchronous scheduling does on GPUs: a step does not wait for its batch."""
    import collections

    core: Any = engine._engine.engine_core.engine_core
    plain = core.batch_queue, core.batch_queue_size, core.step_fn
    core.batch_queue, core.batch_queue_size = collections.deque(maxlen=2), 2
    core.step_fn = core.step_with_batch_queue
    try:
        ended = driving.steps(engine, requests, steps)
        in_flight = len(core.batch_queue)
        engine.pause()
        ended += engine.take_ended()
        return ended, in_flight, engine.snapshot(), len(core.batch_queue), core.is_scheduler_paused()
    finally:
        core.batch_queue, core.batch_queue_size, core.step_fn = plain
        engine.abort([r.request_id for r in requests])


@pytest.mark.parametrize("steps", [1, 6, 12])
def test_tokens_of_a_batch_in_flight_are_taken(serving: EngineHost, steps: int) -> None:
    """A response that ends in it comes after the pause, once. A batch without requests is taken too."""
    requests = asked(3, max_tokens=6)
    at_once = serving.call(driving.generate, requests)
    ended, in_flight, parts, left, paused = serving.call(with_batches_in_flight, requests, steps)
    assert (left, paused) == (0, False)
    for completion in [*ended, *parts]:
        complete = at_once[int(completion.request_id.split(".")[0])]
        assert completion.tokens.tolist() == complete.tokens[: len(completion.tokens)].tolist()
    lengths = {len(r.tokens) for r in [*ended, *parts]}
    assert len(ended) + len(parts) == 3 and len(lengths) == 1 and in_flight == 1
    assert bool(ended) == (lengths == {6})
    assert serving.call(driving.generate, requests)[0].tokens.tolist() == at_once[0].tokens.tolist()


def with_another_label(engine: RolloutEngine, requests: list[GenerationRequest]) -> Any:
    driving.steps(engine, requests, 2)
    engine._engine.set_weight_version("99")
    try:
        engine.step()
        return engine.pause()
    finally:
        engine.abort([r.request_id for r in requests])
        engine._engine.set_weight_version(str(engine.policy_version))


def test_a_stamp_that_vllm_does_not_bear_out_is_refused(serving: EngineHost) -> None:
    version = serving.call(driving.version)
    with pytest.raises(
        RolloutError, match=rf"3 tokens .* of version {version}, .*\({version}, 0, 2\), \(99, 2, 3\)"
    ):
        serving.call(with_another_label, asked(1))


def test_each_token_is_of_the_version_on_its_stamp(
    serving: EngineHost, tiny_model: Path, tmp_path: Path
) -> None:
    """Three versions in one response: each log-prob agrees with its own version's weights alone."""
    folders = folders_of(tiny_model, tmp_path)
    requests, completions, first = in_three_versions(serving, folders)
    for request, completion in zip(requests, completions, strict=True):
        require_whole(request, completion, 24)
    right, shifted = gaps(requests, completions, folders, first)
    assert right.max() < 1e-4 and shifted.mean() > 10 * right.mean() and shifted.mean() > 0.1


def test_a_weight_sync_among_thousands_of_waiting_requests_ends_and_loses_none(
    serving: EngineHost, tiny_model: Path
) -> None:
    """64 of 2,000 requests run at the pause; the others are computed by the new version alone."""
    requests, version = asked(2000, max_tokens=2), serving.call(driving.version)
    ended, parts = serving.call(driving.paused_after, requests, 1)
    assert not ended and len(parts) == 64
    synced(serving, [tiny_model])
    completions = driving.whole(requests, serving.call(driving.steps, [], 100))
    assert [r.policy_versions.tolist() for r in completions] == [[version, version + 1]] * 64 + [
        [version + 1] * 2
    ] * 1936


@pytest.mark.slow
def test_a_fresh_engine_of_each_version_says_the_same_of_its_tokens(
    serving: EngineHost, tiny_model: Path, tmp_path: Path
) -> None:
    """Such an engine scores all tokens in one pass."""
    folders = folders_of(tiny_model, tmp_path)
    requests, responses, first = in_three_versions(serving, folders)
    rows = [[*q.prompt_tokens.tolist(), *r.tokens.tolist()] for q, r in zip(requests, responses, strict=True)]
    worst, nearest_other = 0.0, []
    for version, folder in enumerate(folders, first):
        fresh = fresh_engine(folder)
        scored = fresh.call(driving.rescored, rows)
        fresh.close()
        for request, completion, logprobs in zip(requests, responses, scored, strict=True):
            gap = abs(logprobs[len(request.prompt_tokens) - 1 :] - completion.logprobs)
            same_version = completion.policy_versions == version
            worst = max(worst, float(gap[same_version].max()))
            nearest_other.append(gap[~same_version].mean())
    assert worst < 1e-5 and min(nearest_other) > 0.1


def fresh_engine(folder: Path) -> EngineHost:
    rollout = RolloutSection(dtype="float32", enforce_eager=True, max_num_seqs=64, kv_cache_bytes=64 << 20)
    return EngineHost(rollout=rollout, model_path=str(folder), max_length=160, seed=1, real_weights=True)


def keep(engine: RolloutEngine, yes: bool) -> None:
    engine._keeps_caches = yes


@pytest.fixture
def keeping(serving: EngineHost) -> Iterator[EngineHost]:
    serving.call(keep, True)
    yield serving
    serving.call(keep, False)


def test_without_a_sync_a_kept_request_is_one_that_was_never_paused(keeping: EngineHost) -> None:
    """Equal to the last bit, in one segment. Six of 70 requests wait in the engine."""
    requests = asked(70)
    at_once = keeping.call(driving.generate, requests)
    segmented = keeping.call(driving.in_segments, requests, 9)
    for request, ours, theirs in zip(requests, segmented, at_once, strict=True):
        require_whole(request, ours, 24)
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.segments == theirs.segments
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    _, parts = keeping.call(driving.paused_after, requests[:3], 5)
    assert [p.tokens.tolist() for p in parts] == [r.tokens[:5].tolist() for r in at_once[:3]]
    completed = driving.whole(requests[:3], keeping.call(driving.steps, [], 40))
    assert [r.tokens.tolist() for r in completed] == [r.tokens.tolist() for r in at_once[:3]]


def test_the_cache_of_earlier_versions_stays(keeping: EngineHost, tiny_model: Path, tmp_path: Path) -> None:
    """Segments agree with vLLM; only the first version's log-probs are exact (docs/asynchrony.md)."""
    folders = folders_of(tiny_model, tmp_path)
    requests, completions, first = in_three_versions(keeping, folders)
    for request, completion in zip(requests, completions, strict=True):
        require_whole(request, completion, 24)
        assert [(s.end, s.version, s.attempt) for s in completion.segments] == [
            (8, first, 0), (16, first + 1, 0), (24, first + 2, 0),
        ]  # fmt: skip
    right, _ = gaps(requests, completions, folders, first)
    in_first = np.concatenate([r.policy_versions for r in completions]) == first
    assert right[in_first].max() < 1e-4 and right[~in_first].mean() > 1e-2


def test_nobody_else_finds_an_old_cache(keeping: EngineHost, tiny_model: Path, tmp_path: Path) -> None:
    """A new request with a kept one's prompt, a full block, is computed by the new weights alone."""
    other = folders_of(tiny_model, tmp_path)[1]
    prompt = np.random.default_rng(3).integers(2, 131, 136).astype(np.int32)
    kept, new = (
        GenerationRequest(f"0.{n}", prompt, sample_seed(5, 0, n), 12, ignore_stop=True) for n in range(2)
    )
    ended, parts = keeping.call(driving.paused_after, [kept], 4)
    assert not ended and len(parts[0].tokens) == 4
    synced(keeping, [other])
    both = driving.whole([kept, new], keeping.call(driving.steps, [new], 20))
    assert driving.worst_gap(other, [new], [both[1]]) < 1e-4
    assert [len(completion.tokens) for completion in both] == [12, 12]
    synced(keeping, [tiny_model])
