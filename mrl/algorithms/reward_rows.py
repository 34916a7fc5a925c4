"""What the rewards and advantages of a batch stand on: its tokens, or its samples where each has one of both.

An outcome estimator gives every policy token of a sample the same advantage, so that a row a sample says all: 8,192 rows instead of
16 million. What is weighed by tokens then counts a row as often as it has policy tokens.
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
    """[K] float64: the policy tokens that a row stands for where the mask is True."""
    segments: Segments
    """The rows of each sample."""
    batch: TrainBatch

    @classmethod
    def of_tokens(cls, batch: TrainBatch, has_reward: np.ndarray) -> AdvantageRows:
        """`has_reward` [B] bool."""
        segments = Segments.of(batch.lengths())
        mask = torch.from_numpy(batch.loss_mask.astype(np.bool_))
        mask &= segments.spread(torch.from_numpy(has_reward))
        return cls(mask, mask.double(), segments, batch)

    @classmethod
    def of_samples(cls, batch: TrainBatch, has_reward: np.ndarray) -> AdvantageRows:
        """`has_reward` [B] bool."""
        lengths = policy_lengths(batch)
        mask = torch.from_numpy((lengths > 0) & has_reward)
        return cls(mask, torch.from_numpy(lengths), Segments.of(np.ones(len(lengths), np.int64)), batch)

    def on_tokens(self, values: Tensor) -> np.ndarray:
        """[K] to [N], in the dtype of the values: a sample's only row on all its tokens."""
        if len(values) == self.batch.num_tokens:
            return values.numpy()
        return np.repeat(values.numpy(), self.batch.lengths())
