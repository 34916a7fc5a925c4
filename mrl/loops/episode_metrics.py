"""Metrics of a step's episodes."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from mrl.samples import Sample, Turn


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the `agent/...` metrics of a step's samples, with or without reward; empty without episodes."""
    episodes = [s.transcript for s in samples if s.transcript is not None]
    if not episodes:
        return {}
    ends = collections.Counter(episode.ended_by for episode in episodes)
    conversations = [part for s in samples for part in s.sequences if part.transcript is not None]
    turns = [turn for part in conversations for turn in _own_turns(part)]
    return {
        "agent/episodes": float(len(episodes)),
        "agent/conversations": len(conversations) / len(episodes),
        "agent/turns": len(turns) / len(episodes),
        "agent/env_seconds_p99": float(np.percentile([t.seconds for t in turns], 99)) if turns else 0.0,
        "agent/retries": float(sum(episode.faults for episode in episodes)),
        "agent/restarted": float(sum(episode.restarts for episode in episodes)),
        **{f"agent/ended_by/{name}": float(count) for name, count in sorted(ends.items())},
    }


def _own_turns(sequence: Sample) -> list[Turn]:
    """Return the turns that are trained in this sequence; an earlier one has those that it shares."""
    turns = sequence.transcript.turns if sequence.transcript is not None else ()
    return [turn for turn in turns if sequence.loss_mask[turn.start]]
