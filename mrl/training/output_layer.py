"""From a micro-batch's hidden states to log-probs or values, on ranks of the last pipeline stage."""

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
from mrl.training.device_microbatch import DeviceMicrobatch
from mrl.training.divergence import Vocabulary
from mrl.training.logprobs import Kept, logprobs_and_entropy
from mrl.training.teacher_targets import TargetsOfTeachers


class OutputLayer:
    """A policy's rows of the output layer, or a critic's value head, applied to hidden states."""

    def __init__(self, chunks: ModelChunks, layout: Layout, *, chunk_tokens: int) -> None:
        """Compute the logits of `chunk_tokens` tokens at a time."""
        self._chunks, self._layout, self._chunk_tokens = chunks, layout, chunk_tokens
        self._tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        self._cp_group: Any = parallel_state.get_context_parallel_group()

    def zero_loss(self, hidden: Tensor) -> Tensor:
        """Return a zero loss that touches every parameter that a loss of tokens would, so that this rank
        joins the overlapped reduction no later than the others."""
        return hidden.sum() * 0.0 + self.weight[:1].sum() * 0.0

    def states(self, item: DeviceMicrobatch, hidden: Tensor) -> Tensor:
        """Return [j, D] the hidden states before item.own_rows, from hidden [k / tp, 1, D]."""
        if self._layout.tp > 1:
            # Backward sums the ranks' gradients for the split output layer. For the value head, which
            # computes the same on all ranks, each takes its own.
            split = not self._chunks.has_value_head
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=split)
        return hidden[:, 0].index_select(0, item.before)

    def outputs(
        self,
        item: DeviceMicrobatch,
        hidden: Tensor,
        temperature: float,
        taught: TargetsOfTeachers | None = None,
    ) -> dict[str, Tensor]:
        """Return [m] log-probs and entropies (and divergence with `taught`), or values, of item.rows from
        hidden [k / tp, 1, D]."""
        states = self.states(item, hidden)
        last: PackedModel = self._chunks.models[-1]
        if self._chunks.has_value_head:
            outputs = {"values": last.values(states)}
        else:
            logprobs, entropy = self.logprobs(states, item.targets, temperature, kept=item.kept)
            outputs = {"logprobs": logprobs, "entropy": entropy}
        if taught is not None:
            vocabulary = self._vocabulary(temperature)
            outputs["divergence"] = taught.divergence(item.own_index, states, self.weight, vocabulary)
        if self._layout.cp == 1:
            return outputs
        size = len(item.rows)
        return {name: self.of_all_ranks(values, item.own_rows, size) for name, values in outputs.items()}

    def logprobs(
        self,
        states: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        kept: Kept | None = None,
        frozen: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs [j] and entropies [j] of targets [j] from states [j, D]; with `frozen` the output
        layer gets no gradient."""
        return logprobs_and_entropy(
            states,
            self.weight.detach() if frozen else self.weight,
            targets,
            vocab_size=self._chunks.vocab_size,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            group=self._tp_group,
            group_rank=self._tp_group.rank(),
            kept=kept,
        )

    @property
    def weight(self) -> Tensor:
        """[V / tp, D] this rank's rows of the output layer, on a policy's last stage."""
        return self._chunks.models[-1].head_weight()

    def _vocabulary(self, temperature: float) -> Vocabulary:
        """Build settings for divergences with a smaller chunk: they need log-probs of two models and derived
        arrays, where log-probs need two arrays."""
        chunk = max(1, self._chunk_tokens // 3)
        return Vocabulary(self._chunks.vocab_size, temperature, chunk, self._tp_group, self._tp_group.rank())

    def of_all_ranks(self, values: Tensor, rows: Tensor, size: int) -> Tensor:
        """Combine context-parallel ranks' values [j] at `rows` [j] into [size], 0 where no rank has any;
        backward gives each its own gradient."""
        whole = scatter_rows(values, rows, size)
        return reduce_from_tensor_model_parallel_region(whole, group=self._cp_group)


def scatter_rows(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """Return [size, ...] with values [m, ...] at `rows` [m] and 0 elsewhere."""
    return values.new_zeros((size, *values.shape[1:])).index_copy(0, rows, values)
