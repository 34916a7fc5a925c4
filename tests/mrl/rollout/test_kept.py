"""Requests that stay in vLLM over a weight sync: their tokens go on over the cache as it is, and nobody else finds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.rollout.drafts import Drafts, whole_sample
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import GenerationRequest, Response, sample_seed
from mrl.samples import Prompt
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.mrl.rollout.versions import asked, folders_of, gaps, in_three_versions, synced

pytestmark = pytest.mark.integration


def keeps(engine: RolloutEngine, yes: bool) -> None:
    engine._keeps = yes
    engine._engine.abort_request(engine._kept.drop(), internal=True)


def num_kept(engine: RolloutEngine) -> tuple[int, int]:
    """What the engine says it keeps, and what vLLM has."""
    return len(engine._kept), engine._engine.get_num_unfinished_requests()


@pytest.fixture
def keeping(serving: EngineHost) -> Iterator[EngineHost]:
    serving.call(keeps, True)
    yield serving
    serving.call(keeps, False)


def test_without_a_sync_a_kept_request_is_one_that_nobody_parked(keeping: EngineHost) -> None:
    """To the last bit, over the parks too: the same cache and the same random stream. Six of 70 wait in the engine."""
    requests = asked(70)
    at_once = keeping.call(driving.generate, requests)
    whole = keeping.call(driving.in_segments, requests, 9)
    for request, ours, theirs in zip(requests, whole, at_once, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
        sample = whole_sample(Prompt(0, request.prompt_tokens, "", None), 0, ours)  # digests are right
        assert [s.start for s in sample.segments] == [0, *(s.end for s in sample.segments[:-1])]
        assert [s.attempt for s in sample.segments] == list(range(len(sample.segments)))
    assert {tuple(s.end for s in r.segments) for r in whole[:64]} == {(9, 18, 24)}
    assert keeping.call(num_kept) == (0, 0)


def test_the_cache_of_earlier_versions_stays(keeping: EngineHost, tiny_model: Path, tmp_path: Path) -> None:
    """vLLM itself says which weights drew each token, and the stamps say the same. Log-probs of a response's first version are
    its weights'; the later ones are of no version, as docs/asynchrony.md says."""
    folders = folders_of(tiny_model, tmp_path)
    requests, whole, first = in_three_versions(keeping, folders)
    right, _ = gaps(requests, whole, folders, first)
    in_first = np.concatenate([r.policy_versions for r in whole]) == first
    assert right[in_first].max() < 1e-4 and right[~in_first].mean() > 1e-2


def test_nobody_else_finds_an_old_cache(keeping: EngineHost, tiny_model: Path, tmp_path: Path) -> None:
    """A new request of a kept one's prompt, a block of the cache long, is computed by the new weights alone, beside it."""
    other = folders_of(tiny_model, tmp_path)[1]
    prompt = np.random.default_rng(3).integers(2, 131, 136).astype(np.int32)
    kept, new = (
        GenerationRequest(f"0.{n}", prompt, sample_seed(5, 0, n), 12, ignore_stop=True) for n in range(2)
    )
    drafts = Drafts(driving.SEED)
    drafts.ask([kept])
    assert not drafts.take(keeping.call(driving.steps_and_park, [kept], 4))
    assert keeping.call(num_kept) == (1, 1)
    synced(keeping, [other])
    ended = keeping.call(driving.steps_and_park, [*drafts.resubmit(), new], 20)
    whole = {r.request_id: r for r in ended}
    assert driving.worst_gap(other, [new], [whole["0.1"]]) < 1e-4
    assert len(drafts.take([whole["0.0"]])[0].tokens) == 12
    synced(keeping, [tiny_model])


def displaced(
    engine: RolloutEngine, requests: list[GenerationRequest], others: list[GenerationRequest]
) -> Any:
    """Parked, others in between, and asked again: how many were kept after each."""
    drafts = Drafts(driving.SEED)
    drafts.ask(requests)
    drafts.take(driving.steps_and_park(engine, requests, 5))
    kept = [num_kept(engine)]
    between = driving.generate(engine, others)
    kept.append(num_kept(engine))
    whole: list[Response] = drafts.take(driving.steps_and_park(engine, drafts.resubmit(), 50))
    return kept, between, whole


def test_a_validation_takes_the_places_of_what_was_kept(keeping: EngineHost, tiny_model: Path) -> None:
    """It is not held up, and what was kept is computed again; no token is lost or drawn twice."""
    requests, others = asked(6, max_tokens=12), asked(3, seed=9)
    kept, between, whole = keeping.call(displaced, requests, others)
    assert kept == [(6, 6), (0, 0)] and len(between) == 3
    by_id = {r.request_id: r for r in whole}
    answers = [by_id[r.request_id] for r in requests]
    assert {len(r.tokens) for r in answers} == {12}
    assert driving.worst_gap(tiny_model, requests, answers) < 1e-4
