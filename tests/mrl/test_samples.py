"""Versions of a sample's tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mrl.loops.staleness import newest_version, token_counts
from mrl.samples import Group, ResponseSegment, Sample, Transcript
from mrl.training.batch import staleness_of
from tests.support.samples import make_sample


def drawn(rng: np.random.Generator, *, episode: bool, with_segments: bool) -> Sample:
    """Return a sample with growing versions; in an episode, an observation follows each segment."""
    versions, masks, segments, at = [], [], [], 0
    for _ in range(int(rng.integers(0, 4))):
        length, version = int(rng.integers(1, 5)), int(rng.integers(0, 4))
        segments.append(ResponseSegment(at, at + length, version, 0, 0, 0))
        versions += [version] * length
        masks += [True] * length
        observed = int(rng.integers(0, 3)) if episode else 0
        versions += [-1] * observed
        masks += [False] * observed
        at += length + observed
    return dataclasses.replace(
        make_sample(length=at),
        policy_versions=np.array(versions, np.int32),
        loss_mask=np.array(masks, np.bool_),
        segments=tuple(segments) if with_segments else (),
        transcript=Transcript(()) if episode else None,
    )


@pytest.mark.parametrize("episode", [False, True])
@pytest.mark.parametrize("with_segments", [False, True])
def test_runs_of_versions_are_those_of_the_tokens(episode: bool, with_segments: bool) -> None:
    """From segments or from the tokens, with everything counted by them."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        samples = tuple(drawn(rng, episode=episode, with_segments=with_segments) for _ in range(3))
        for sample in samples:
            versions = np.full(len(sample.loss_mask), -1)
            for start, end, version in sample.version_runs():
                assert start < end
                versions[start:end] = version
            assert versions.tolist() == np.where(sample.loss_mask, sample.policy_versions, -1).tolist()
        group = Group(samples[0].prompt_index, samples)  # type: ignore[arg-type] nobody asks for the prompt
        all_versions = np.concatenate([s.policy_versions[s.loss_mask] for s in samples])
        assert newest_version(group) == all_versions.max(initial=-1)
        assert token_counts(group, 2).tolist() == np.bincount(np.maximum(2 - all_versions, 0)).tolist()
        flat = [
            np.concatenate([np.zeros(len(s.prompt_tokens)), np.where(s.loss_mask, 5 - s.policy_versions, 0)])
            for s in samples
        ]
        assert staleness_of([group], version=5).tolist() == np.concatenate(flat).tolist()
