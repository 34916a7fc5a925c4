"""What a group's samples take in memory."""

from __future__ import annotations

from mrl.samples import Group, Sample

TOKEN_BYTES = 20
"""About the most that a token of a response takes: 8 of arrays in a checkpoint, the rest of text."""


def size_of(group: Group) -> int:
    """About the bytes that a group takes in memory: those of its samples' arrays, and of their text."""
    return sum(_sample_size(sample) for sample in group.samples)


def _sample_size(sample: Sample) -> int:
    size = sample.prompt_tokens.nbytes + sample.response_tokens.nbytes + sample.rollout_logprobs.nbytes
    size += sample.loss_mask.nbytes + sample.policy_versions.nbytes + len(sample.response_text)
    if sample.verdict is not None and sample.verdict.token_values is not None:
        size += sample.verdict.token_values.nbytes
    return size
