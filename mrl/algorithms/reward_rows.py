"""Rows on which a batch's rewards and advantages are computed: tokens, or samples if each has one value.

An outcome estimator gives all policy tokens of a sample one advantage, so one row per sample suffices: 8,192
rows instead of 16 million. Token-weighted statistics count a row as often as it has policy tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.outcomes import policy_lengths
from mrl.algorithms.tokens import Segments
from mrl.samples import TrainBatch


@dataclasses.dataclass(frozen=True, slots=True)
class AdvantageRows:
    """K rows over the B samples of a batch of N tokens: K is N or B."""

    mask: Tensor
    """[K] bool: rows with policy tokens of samples that have a reward."""
    weights: Tensor
    """[K] float64: number of policy tokens that a row represents, if the mask is True."""
    segments: Segments
    """Rows of each sample."""
    batch: TrainBatch

    @classmethod
    def of_tokens(cls, batch: TrainBatch, has_reward: np.ndarray) -> AdvantageRows:
        """Build one row per token; `has_reward` [B] bool."""
        segments = Segments.of(batch.lengths())
        mask = torch.from_numpy(batch.loss_mask.astype(np.bool_))
        mask &= segments.to_tokens(torch.from_numpy(has_reward))
        return cls(mask, mask.double(), segments, batch)

    @classmethod
    def of_samples(cls, batch: TrainBatch, has_reward: np.ndarray) -> AdvantageRows:
        """Build one row per sample; `has_reward` [B] bool."""
        lengths = policy_lengths(batch)
        mask = torch.from_numpy((lengths > 0) & has_reward)
        return cls(mask, torch.from_numpy(lengths), Segments.of(np.ones(len(lengths), np.int64)), batch)

    def to_tokens(self, values: Tensor) -> np.ndarray:
        """Spread [K] to [N] in the dtype of the values: a sample's only row to all its tokens."""
        if len(values) == self.batch.num_tokens:
            return values.numpy()
        return np.repeat(values.numpy(), self.batch.lengths())
