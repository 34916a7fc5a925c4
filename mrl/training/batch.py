"""Pure functions between groups, packed training batches, minibatches and per-rank results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.routes import Routes
from mrl.samples import Group, Sample, TrainBatch
from mrl.sampling_masks import join_masks


def pack(groups: Sequence[Group], *, with_routes: bool = False) -> TrainBatch:
    """Pack all sequences, in order, into a flat batch with `rollout_logprobs`; prompts have mask False.

    `with_routes` adds the engines' routes for every pass; a sequence without any has no rows, which passes
    reject.
    """
    samples = _sequences(groups)
    lengths = [len(s.prompt_tokens) + len(s.response_tokens) for s in samples]
    return TrainBatch(
        tokens=_join([part for s in samples for part in (s.prompt_tokens, s.response_tokens)], np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=_after_prompts(samples, [s.loss_mask for s in samples], np.bool_),
        group_ids=np.array([s.prompt_index for s in samples], dtype=np.int64),
        sample_ids=tuple(s.sample_id for s in samples),
        arrays={
            "rollout_logprobs": _after_prompts(samples, [s.rollout_logprobs for s in samples], np.float32)
        },
        routes=tuple(s.routes or Routes(()) for s in samples) if with_routes else None,
        sampling_masks=join_masks(
            part
            for s in samples
            for part in ((None, len(s.prompt_tokens)), (s.sampling_masks, len(s.response_tokens)))
        ),
        samples=_sample_of_sequences(groups),
    )


def _sequences(groups: Sequence[Group]) -> list[Sample]:
    return [sequence for group in groups for sequence in group.sequences()]


def _sample_of_sequences(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return the index of each sequence's sample, for `TrainBatch.samples`; empty without branches."""
    counts = [1 + len(sample.branches) for group in groups for sample in group.samples]
    return {"sample": np.repeat(np.arange(len(counts)), counts)} if sum(counts) > len(counts) else {}


def staleness_of(groups: Sequence[Group], *, version: int) -> np.ndarray:
    """Return each policy token's staleness in versions before `version`, aligned with `pack(groups)`: [N]
    float32, 0 for other tokens."""
    samples = _sequences(groups)
    lengths = [len(s.prompt_tokens) + len(s.response_tokens) for s in samples]
    staleness, end_of_sample = np.zeros(sum(lengths), np.float32), 0
    for sample, length in zip(samples, lengths, strict=True):
        response, end_of_sample = end_of_sample + len(sample.prompt_tokens), end_of_sample + length
        for start, end, sampled in sample.version_runs():
            staleness[response + start : response + end] = version - sampled
    return staleness


def first_versions(groups: Sequence[Group]) -> np.ndarray:
    """Return [N] the version of the first response token of each token's sequence in pack(groups)."""
    samples = _sequences(groups)
    lengths = [len(s.prompt_tokens) + len(s.response_tokens) for s in samples]
    return np.repeat([int(s.policy_versions[0]) if len(s.policy_versions) else 0 for s in samples], lengths)


def merge_parts(batch: TrainBatch, parts: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """Put per-token results of the ranks' parts (balance.py) back into the batch's order: [N]."""
    merged = np.zeros(batch.num_tokens, dtype=values[0].dtype if len(values) else np.float32)
    for positions, part in zip(parts, values, strict=True):
        done = 0
        for tokens in batch.spans(positions):
            size = tokens.stop - tokens.start
            merged[tokens], done = part[done : done + size], done + size
        assert done == len(part), f"{len(part)} results for {done} tokens"
    return merged


def minibatches(batch: TrainBatch, count: int) -> list[np.ndarray]:
    """Split sample positions into minibatches of whole groups, in order, nearly even, none empty."""
    groups = batch.groups()
    pieces = np.array_split(np.arange(len(groups)), max(1, min(count, len(groups))))
    return [np.concatenate(groups[p[0] : p[-1] + 1]) for p in pieces if len(p)]


def _after_prompts(samples: Sequence[Sample], values: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Join responses' values with zeros for the prompts before them: [N]."""
    zeros = np.zeros(max((len(s.prompt_tokens) for s in samples), default=0), dtype)
    pairs = zip(samples, values, strict=True)
    return _join([part for s, value in pairs for part in (zeros[: len(s.prompt_tokens)], value)], dtype)


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype)
