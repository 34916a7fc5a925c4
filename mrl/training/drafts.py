"""Train a draft head (models/megatron/draft_head.py) beside the policy, on ranks of the last pipeline stage.

It reads the policy's states, embedding and output layer as constants, so no gradient leaves it. Its loss is
the cross-entropy of the trained tokens, divided like the policy's by step-wide counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from mrl.models.layout import Layout, RankCoordinates
from mrl.models.megatron.build import ModelChunks
from mrl.training.device_microbatch import DeviceMicrobatch
from mrl.training.output_layer import OutputLayer


class Drafts:
    """The draft head of a model, and how to run it."""

    def __init__(
        self, head: OutputLayer, chunks: ModelChunks, layout: Layout, place: RankCoordinates
    ) -> None:
        self._head, self._chunks, self._layout, self._place = head, chunks, layout, place
        self._weight: Tensor | None = None
        """[V / tp, D] this rank's rows of the embedding, inside embedding()."""

    @contextlib.contextmanager
    def embedding(self) -> Iterator[None]:
        """Give the last stage the embedding of the first, unless it has it; a collective of both."""
        self._weight = self._taken()
        try:
            yield
        finally:
            self._weight = None

    def _taken(self) -> Tensor | None:
        first, last = self._place.pp == 0, self._place.pp == self._layout.pp - 1
        if not (first or last):
            return None
        embedding: Any = self._chunks.models[0].embedding.word_embeddings.weight if first else None
        weight: Tensor = torch.empty_like(self._head.weight) if embedding is None else embedding.detach()
        if self._layout.pp > 1:
            group: Any = parallel_state.get_embedding_group()
            dist.broadcast(weight, src=parallel_state.get_pipeline_model_parallel_first_rank(), group=group)
        return weight

    def logprobs(self, item: DeviceMicrobatch, hidden: Tensor, temperature: float) -> Tensor:
        """Return [m] log-probs of item.rows from the policy's hidden states [k / tp, 1, D]; 0 for a segment's
        second token, which nothing drafts. Gradients reach the draft head alone, in every case, because its
        experts are collectives."""
        head, tokens = self._chunks.models[-1].draft_head, item.drafts
        assert head is not None and tokens is not None
        states = head(self._embedded(tokens.following), hidden.detach(), item.packed)
        if self._layout.tp > 1:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True)
        states = states[:, 0].index_select(0, tokens.before)
        logprobs = states.sum(-1).float()  # of no rows
        if len(tokens.before):
            logprobs, _ = self._head.logprobs(states, tokens.targets, temperature, frozen=True)
        return self._head.of_all_ranks(logprobs, tokens.rows, len(item.rows))

    @torch.no_grad()
    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [k / tp, 1, D] of tokens [k]; 0 for -1."""
        assert self._weight is not None, "outside of embedding()"
        rows = tokens - self._place.tp * len(self._weight)
        is_here = (tokens >= 0) & (rows >= 0) & (rows < len(self._weight))
        values = self._weight.index_select(0, rows.where(is_here, 0)) * is_here[:, None]
        return reduce_scatter_to_sequence_parallel_region(values[:, None])


def draft_loss(drafted: Tensor, denominators: Mapping[str, Any]) -> Tensor:
    """Return the cross-entropy of drafted log-probs [m], divided by the step's trained tokens."""
    return -drafted.sum() / max(1.0, denominators["num_tokens"])


def draft_metrics(
    item: DeviceMicrobatch, drafted: Tensor, logprobs: Tensor, denominators: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the loss, and the probability that policy p and draft head q share: the sum of min(p, q) over
    the vocabulary, estimated as the mean of min(1, q / p) over tokens drawn from p."""
    assert item.drafts is not None
    shared = (drafted.detach() - logprobs).clamp(max=0).exp() * item.drafts.is_drafted
    return {
        "draft/loss": draft_loss(drafted.detach(), denominators),
        "draft/overlap": shared.sum() / max(1.0, denominators["num_tokens"]),
    }
