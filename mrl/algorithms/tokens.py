"""Tokens of one packed batch: their sequences, and the only check of their values.

Owns sums over sequences, the error messages of the checks, and the denominators of metrics. Knows no rewards
or losses.

Metrics follow one rule everywhere: they are already divided by the step-wide denominators, so values of
micro-batches and ranks add up. Names ending in _max are combined by maximum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Clamp of log probability ratios before exp, so that one extreme token stays finite."""


class NotFiniteError(ValueError):
    """A value that enters a loss is NaN or infinite; the message names the array and the sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """B sequences over N flat tokens; sequences of lengths 2 and 1 have the ids [0 0 1]."""

    ids: Tensor
    """[N] int64, 0..B-1, nondecreasing."""
    count: int
    """B; sequences without a token are allowed."""
    values: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Facts about each sequence by name, [B] or [B, K]."""

    @classmethod
    def of(
        cls,
        lengths: np.ndarray,
        *,
        device: torch.device | str = "cpu",
        values: Mapping[str, np.ndarray] | None = None,
    ) -> Segments:
        """Build from the [B] lengths of contiguous sequences and facts about each."""
        ids = np.repeat(np.arange(len(lengths)), lengths)
        known = {name: torch.from_numpy(value).to(device) for name, value in (values or {}).items()}
        return cls(ids=torch.from_numpy(ids).to(device), count=len(lengths), values=known)

    def sum(self, values: Tensor) -> Tensor:
        """Sum per sequence, [N] to [B]."""
        return values.new_zeros(self.count).index_add(0, self.ids, values)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Give each token its sequence's value, [B] to [N]."""
        return values[self.ids]

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the masked mean per sequence, [N] to [B]; 0 for a sequence without tokens."""
        counts = self.sum(mask.to(values.dtype))
        return self.sum(values * mask) / counts.clamp(min=1)

    def on_last_token(self, values: Tensor, mask: Tensor) -> Tensor:
        """Put each sequence's value on its last masked-in token, [B] to [N]; drop it if there is none."""
        positions = mask.nonzero()[:, 0]
        last = positions.new_full((self.count,), -1)
        last = last.scatter_reduce(0, self.ids[positions], positions, "amax")
        flat = values.new_zeros(len(mask))
        flat[last[last >= 0]] = values[last >= 0]
        return flat


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """Trained tokens of one micro-batch, and the denominators of sums over them."""

    mask: Tensor
    """[N] bool."""
    segments: Segments
    num_tokens: Tensor
    """Scalar: trained tokens of the whole optimizer step, at least 1 (so that an empty mean is 0)."""
    num_sequences: Tensor
    """Scalar: sequences of the whole optimizer step with a trained token, at least 1."""

    def token_mean(self, values: Tensor) -> Tensor:
        """Return the detached sum of [N] values over the mask / num_tokens; bool counts as 0 and 1."""
        floats = values.detach().to(values.dtype if values.is_floating_point() else torch.float64)
        return floats.masked_fill(~self.mask, 0.0).sum() / self.num_tokens

    def token_max(self, values: Tensor) -> Tensor:
        """Return the detached largest of nonnegative [N] values on the mask, 0 if it is empty."""
        kept = values.detach().masked_fill(~self.mask, 0.0)
        return kept.max() if kept.numel() else kept.new_zeros(())


def checked(arrays: Mapping[str, Tensor], mask: Tensor, segments: Segments) -> dict[str, Tensor]:
    """Return the [N] arrays with 0 off the mask, so that values there have no effect.

    The host waits for the device once, whatever the number of arrays. Raise TypeError for a mask that is not
    bool or arrays that are neither float32 nor float64, ValueError for a shape other than the mask's, and
    NotFiniteError for NaN or infinity on a masked-in token, with the index of its sample.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"loss_mask: dtype {mask.dtype}, expected bool")
    for name, values in arrays.items():
        if values.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name}: dtype {values.dtype}, expected float32 or float64")
        if values.shape != mask.shape:
            raise ValueError(
                f"{name}: shape {tuple(values.shape)}, expected that of loss_mask {tuple(mask.shape)}"
            )
    kept = {name: values.masked_fill(~mask, 0.0) for name, values in arrays.items()}
    finite = {name: torch.isfinite(values.detach()) for name, values in kept.items()}
    if not bool(torch.stack([flags.all() for flags in finite.values()]).all()):
        name = next(name for name, flags in finite.items() if not bool(flags.all()))
        position = int((~finite[name]).nonzero()[0, 0])
        raise NotFiniteError(
            f"{name}: {kept[name][position].item()} in sample {int(segments.ids[position])} "
            f"(flat token {position}); exclude the sample or find the cause upstream"
        )
    return kept


def check_samples(name: str, values: Tensor, count: int) -> None:
    """Raise ValueError, with the sample's index, unless `values` are [count] finite numbers."""
    if values.shape != (count,):
        raise ValueError(f"{name}: shape {tuple(values.shape)}, expected [{count}], one entry per sample")
    if not bool(torch.isfinite(values).all()):
        sample = int((~torch.isfinite(values)).nonzero()[0, 0])
        raise ValueError(
            f"{name}: {values[sample].item()} in sample {sample}; exclude it or mark it as not scored"
        )
