"""Per-token values in samples.jsonl: text, log-prob, importance ratio, staleness and advantage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mrl.samples import Sample, TrainBatch

DIGITS = 4
"""Decimals of a value, enough for colours and reading."""
Pieces = Callable[[np.ndarray], list[str]]
"""Function from [T] tokens to T texts (mrl/data/tokenise.py, `pieces`)."""


class TokenValues:
    """Token values of the samples of one step's batch, after packing and advantage estimation."""

    def __init__(self, batch: TrainBatch, pieces: Pieces) -> None:
        self._batch, self._pieces = batch, pieces
        self._places = {name: place for place, name in enumerate(batch.sample_ids)}
        """Segment of each sample's response, which comes after those of its branches."""

    def values(self, sample: Sample) -> dict[str, Any]:
        """Return JSON values of the response's T tokens: `text` is a list of T; the others are lists, or one
        number if all are equal.

        `policy` is 0 for tokens of the environment. `ratio` (trainer's to engine's probability), `age` and
        `advantage` are present if the batch has them.
        """
        bounds, place = self._batch.cu_seqlens, self._places[sample.sample_id]
        response = slice(bounds[place] + len(sample.prompt_tokens), bounds[place + 1])
        arrays = {name: array[response] for name, array in self._batch.arrays.items()}
        values = {"policy": sample.loss_mask.astype(np.int64), "logprob": sample.rollout_logprobs}
        if "old_logprobs" in arrays:
            values["ratio"] = np.exp(arrays["old_logprobs"] - sample.rollout_logprobs)
        if "age" in arrays:
            values["age"] = arrays["age"].astype(np.int64)
        if "advantages" in arrays:
            values["advantage"] = arrays["advantages"]
        shown = {name: _compact(array) for name, array in values.items() if len(array)}
        return {"text": self._pieces(sample.response_tokens)} | shown


def _compact(array: np.ndarray) -> int | float | Sequence[int | float]:
    rounded = np.round(array.astype(np.float64), DIGITS) if array.dtype.kind == "f" else array
    return rounded[0].item() if (rounded == rounded[0]).all() else rounded.tolist()
