"""Memory size of a group's samples."""

from __future__ import annotations

from mrl.samples import Group, Sample

TOKEN_BYTES = 20
"""Approximate maximum bytes per response token: 8 of arrays in a checkpoint, the rest for text."""


def size_of(group: Group) -> int:
    """Return the approximate memory of a group in bytes: its samples' arrays and text."""
    return sum(_sample_size(sequence) for sequence in group.sequences())


def _sample_size(sample: Sample) -> int:
    size = sample.prompt_tokens.nbytes + sample.response_tokens.nbytes + sample.rollout_logprobs.nbytes
    size += sample.loss_mask.nbytes + sample.policy_versions.nbytes + len(sample.response_text)
    if sample.sampling_masks is not None:
        size += sample.sampling_masks.counts.nbytes + sample.sampling_masks.tokens.nbytes
    if sample.verdict is not None and sample.verdict.token_values is not None:
        size += sample.verdict.token_values.nbytes
    return size
