"""From groups to packed training batches, and their fair split over data-parallel ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.samples import Group, Sample, TrainBatch


def pack(groups: Sequence[Group]) -> TrainBatch:
    """All samples of the groups, in order, as one flat batch with `rollout_logprobs`; prompts carry mask False."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(s.prompt_tokens) + len(s.response_tokens) for s in samples]
    return TrainBatch(
        tokens=_join([part for s in samples for part in (s.prompt_tokens, s.response_tokens)], np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=_after_prompts(samples, [s.loss_mask for s in samples], np.bool_),
        group_ids=np.array([s.prompt_index for s in samples], dtype=np.int64),
        sample_ids=tuple(s.sample_id for s in samples),
        arrays={
            "rollout_logprobs": _after_prompts(samples, [s.rollout_logprobs for s in samples], np.float32),
        },
    )


def policy_versions(groups: Sequence[Group]) -> np.ndarray:
    """[N] the version each token of `pack(groups)` was sampled from; 0 for prompts. Stays with the driver."""
    samples = [sample for group in groups for sample in group.samples]
    return _after_prompts(samples, [s.policy_versions for s in samples], np.int32)


def ages(batch: TrainBatch, versions: np.ndarray, *, version: int) -> np.ndarray:
    """[N] float32: how many versions before `version` the weights were that sampled each policy token; 0 for others.

    `versions` [N] as policy_versions() gives them.
    """
    return np.where(batch.loss_mask, version - versions, 0).astype(np.float32)


def split(batch: TrainBatch, parts: int) -> list[np.ndarray]:
    """Sample positions of each data-parallel rank: longest first to the rank with the fewest tokens, then in order.

    Every sample lies in exactly one part; parts may be empty. Deterministic.
    """
    loads, chosen = [0] * parts, [[] for _ in range(parts)]
    lengths = batch.lengths()
    for position in np.argsort(-lengths, kind="stable"):
        least = loads.index(min(loads))
        loads[least] += int(lengths[position])
        chosen[least].append(int(position))
    return [np.array(sorted(part), dtype=np.int64) for part in chosen]


def merge(batch: TrainBatch, parts: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """Per-token results of the parts of `split`, back in the batch's order: [N]."""
    merged = np.zeros(batch.num_tokens, dtype=values[0].dtype if len(values) else np.float32)
    for positions, part in zip(parts, values, strict=True):
        merged[batch.positions(positions)] = part
    return merged


def minibatches(batch: TrainBatch, count: int) -> list[np.ndarray]:
    """Sample positions of each minibatch: whole groups, in order, as even as groups allow; never an empty one."""
    starts = [i for i in range(batch.num_samples) if i == 0 or batch.group_ids[i] != batch.group_ids[i - 1]]
    count = max(1, min(count, len(starts)))
    pieces = np.array_split(np.arange(len(starts)), count)
    bounds = starts + [batch.num_samples]
    return [np.arange(bounds[p[0]], bounds[p[-1] + 1], dtype=np.int64) for p in pieces if len(p)]


def _after_prompts(samples: Sequence[Sample], values: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Responses' values with zeros for the prompts before them: [N]."""
    lengths = [n for s, own in zip(samples, values, strict=True) for n in (len(s.prompt_tokens), len(own))]
    behind = np.repeat(np.tile([False, True], len(samples)), lengths)
    spread = np.zeros(len(behind), dtype)
    spread[behind] = _join(values, dtype)
    return spread


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
