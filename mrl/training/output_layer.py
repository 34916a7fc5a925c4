"""The way from a microbatch's hidden states to log-probs or values, on ranks of the last pipeline stage."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from mrl.models.layout import Layout
from mrl.models.megatron.build import ModelChunks, PackedModel
from mrl.training.divergence import Vocabulary
from mrl.training.lessons import Lessons
from mrl.training.logprobs import logprobs_and_entropy
from mrl.training.prepared import Prepared


class OutputLayer:
    """A policy's rows of the output layer, or a critic's value head, and what they make of hidden states."""

    def __init__(self, chunks: ModelChunks, layout: Layout, *, chunk_tokens: int) -> None:
        """`chunk_tokens`: how many tokens' logits are there at a time."""
        self._chunks, self._layout, self._chunk_tokens = chunks, layout, chunk_tokens
        self._tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        self._cp_group: Any = parallel_state.get_context_parallel_group()

    def nothing(self, hidden: Tensor) -> Tensor:
        """A loss of 0 whose gradients are zeros of the same parameters that a loss of tokens has gradients of: replicas sum them
        while the backward pass goes on, and a rank must not have them later than the others."""
        return hidden.sum() * 0.0 + self.weight[:1].sum() * 0.0

    def states(self, item: Prepared, hidden: Tensor) -> Tensor:
        """[j, D] the hidden states before item.own_rows, from hidden [k / tp, 1, D]."""
        if self._layout.tp > 1:
            # Backward scatters: the ranks' parts summed for the split output layer, each its own for the value head,
            # which computes the same on all ranks.
            split = not self._chunks.has_value_head
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=split)
        return hidden[:, 0].index_select(0, item.before)

    def outputs(
        self, item: Prepared, hidden: Tensor, temperature: float, taught: Lessons | None = None
    ) -> dict[str, Tensor]:
        """[m] log-probs and entropies (and divergence, where it is taught), or values, of item.rows from
        hidden [k / tp, 1, D]."""
        states = self.states(item, hidden)
        last: PackedModel = self._chunks.models[-1]
        if self._chunks.has_value_head:
            outputs = {"values": last.values(states)}
        else:
            logprobs, entropy = logprobs_and_entropy(
                states,
                self.weight,
                item.targets,
                vocab_size=self._chunks.vocab_size,
                temperature=temperature,
                chunk_tokens=self._chunk_tokens,
                group=self._tp_group,
                group_rank=self._tp_group.rank(),
            )
            outputs = {"logprobs": logprobs, "entropy": entropy}
        if taught is not None:
            vocabulary = self._vocabulary(temperature)
            outputs["divergence"] = taught.divergence(item.own_index, states, self.weight, vocabulary)
        if self._layout.cp == 1:
            return outputs
        return {name: self._of_all_ranks(item, values) for name, values in outputs.items()}

    @property
    def weight(self) -> Tensor:
        """[V / tp, D] this rank's rows of the output layer, of a policy's last stage."""
        return self._chunks.models[-1].head_weight()

    def _vocabulary(self, temperature: float) -> Vocabulary:
        """As divergences see it, which hold log-probs of two models and what is derived where log-probs hold two arrays."""
        chunk = max(1, self._chunk_tokens // 3)
        return Vocabulary(self._chunks.vocab_size, temperature, chunk, self._tp_group, self._tp_group.rank())

    def _of_all_ranks(self, item: Prepared, values: Tensor) -> Tensor:
        """Puts together [m] from context-parallel ranks' [j]; backward each takes its own gradient."""
        whole = spread(values, item.own_rows, len(item.rows))
        return reduce_from_tensor_model_parallel_region(whole, group=self._cp_group)


def spread(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """[size, ...] with values [m, ...] at `rows` [m] and 0 elsewhere."""
    return values.new_zeros((size, *values.shape[1:])).index_copy(0, rows, values)
