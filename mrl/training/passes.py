"""Forward and forward-backward passes of this rank's model chunks over one data-parallel shard of a batch.

Owns the agreement of ranks on micro-batches, and Megatron's schedule. Does not step the optimizer
(optimizer.py) and knows no loss: callers pass the objective.

Context-parallel ranks run their chunks of each micro-batch and combine log-probs or values. Each then
computes the whole objective, whose gradient flows only into that rank's own outputs. So their gradients add
up to the objective's, and metrics are taken from one of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.algorithms.tokens import NotFiniteError, Segments
from mrl.config.sections.training import TrainingSection
from mrl.errors import DataError
from mrl.models.family import DRAFTS
from mrl.models.kernels.zigzag import rank_positions
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.megatron.build import ModelChunks
from mrl.models.megatron.layer_modules import RecordingRouter
from mrl.models.megatron.packed_attention import core_attention
from mrl.models.megatron.packed_segments import pack_segments
from mrl.samples import TrainBatch
from mrl.sampling_masks import SamplingMasks
from mrl.training.device_microbatch import DeviceMicrobatch, DraftTokens
from mrl.training.drafts import Drafts, draft_loss, draft_metrics
from mrl.training.logprobs import Kept
from mrl.training.output_layer import OutputLayer, scatter_rows
from mrl.training.packing import Microbatch, count_microbatches, pack_microbatches
from mrl.training.pass_options import PassOptions
from mrl.training.platform.parallel import max_over_world
from mrl.training.replay import Replay
from mrl.training.router_loads import ExpertLoad, prefix_minimum, recorded_margins
from mrl.training.teacher_targets import TargetsOfTeachers, TeacherStates, TeacherTargets

log = logging.getLogger(__name__)

Objective = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""objective(logprobs=[n], entropy=[n], arrays={name: [n]}, segments, denominators) -> (loss, metrics).

A critic's objective takes values=[n] instead; the value of entry t is that of the state before it. With
teacher targets it also takes divergence=[n], 0 where no teacher applies. The loss and the metrics are already
divided by step-wide denominators: they are summed over micro-batches and ranks. The loss is always reported
as the metric "loss". Entries with a False `arrays["loss_mask"]` are 0 in logprobs and entropy, without
gradient. An objective raises NotFiniteError for inputs that are not finite; outputs are checked nowhere else.
Every rank then skips the optimizer step.
"""
ParameterSwap = Callable[[], contextlib.AbstractContextManager[object]]
"""Context that swaps other parameters in for the policy's, on this rank only: no rank waits there."""


class Passes:
    """Model chunks of one rank, and how to run them."""

    def __init__(
        self,
        chunks: ModelChunks,
        models: list[Any],
        *,
        training: TrainingSection,
        layout: Layout,
        place: RankCoordinates,
        device: torch.device,
    ) -> None:
        """Build from chunks; `models` are the chunks wrapped for data parallelism, in chunk order."""
        self._chunks = chunks
        self._models = models
        self._training = training
        self._layout = layout
        self._place = place
        self._device = device
        self._is_last = place.pp == layout.pp - 1
        self._returns_arrays = self._is_last and place.tp == place.cp == 0
        self._head = OutputLayer(chunks, layout, chunk_tokens=training.logprob_chunk_tokens)
        self._drafts = Drafts(self._head, chunks, layout, place) if chunks.has_drafts else None
        config = chunks.config
        self.expert_load = ExpertLoad(
            self._routers(),
            num_layers=config.num_layers,
            num_experts=config.num_moe_experts or 0,
            device=device,
        )
        """How the tokens of the last forward_backward() were spread over experts."""
        self.replay = Replay(self._routers(), config, tp=layout.tp, tp_rank=place.tp, device=device)
        """Routes that passes take from their batch, or record."""

    def forward(
        self, batch: TrainBatch, options: PassOptions, *, reference: ParameterSwap | None = None
    ) -> dict[str, np.ndarray] | None:
        """Return log-probs and entropy (critic: values) [N] of all tokens but segments' first, the options'
        extras, and with `reference` also `ref_logprobs` [N]; None on ranks without outputs."""
        prepared = self._prepare(batch, all_tokens=True)
        ref = {} if reference is None else self._ref_logprobs(reference, batch, prepared, options.temperature)
        margins = self._infinite_margins(prepared) if options.with_router_margins else []
        loss = self._forward_loss(options.temperature)
        with torch.no_grad(), self._choices(batch, prepared, record=options.record_routes):
            outputs = self._run(prepared, loss, forward_only=True, margins=margins)
            routes = {"routes": self.replay.rows(batch, prepared)} if options.record_routes else {}
        arrays = self._arrays_of(batch, prepared, outputs, margins)
        return None if arrays is None else arrays | routes | ref

    def _ref_logprobs(
        self,
        reference: ParameterSwap,
        batch: TrainBatch,
        prepared: list[DeviceMicrobatch],
        temperature: float,
    ) -> dict[str, np.ndarray]:
        """Return `ref_logprobs` [N] of the micro-batches' scored tokens, on ranks of the last stage.

        The next pass takes the same micro-batches, without a collective in between. A finished stage restores
        its own parameters and continues, so the pipeline fills and drains only once.
        """
        with torch.no_grad(), reference(), self._choices(batch, prepared):
            outputs = self._run(prepared, self._forward_loss(temperature), forward_only=True, margins=[])
        return (
            {"ref_logprobs": self._flat_arrays(batch, prepared, outputs)["logprobs"]} if self._is_last else {}
        )

    def lesson(self, batch: TrainBatch, samples: np.ndarray) -> TeacherTargets | None:
        """Return teacher targets by the current parameters for the trained tokens of `samples` [S] of
        the batch; None on ranks without an output layer."""
        part = batch.select(samples)
        prepared = self._prepare(part, all_tokens=False)

        def keep(item: DeviceMicrobatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            return self._head.states(item, hidden)

        with torch.no_grad():
            outputs = self._run(prepared, keep, forward_only=True, margins=[])
        if not self._is_last:
            return None
        places = np.concatenate([item.own_index for item in prepared])
        rows = np.full(batch.num_tokens, -1)
        rows[batch.positions(samples)[places]] = np.arange(len(places))
        # a copy, because the layer becomes the policy's again
        states = TeacherStates(torch.cat(outputs), self._head.weight.detach().clone())
        return TeacherTargets(rows, states)

    def _choices(
        self, batch: TrainBatch, prepared: list[DeviceMicrobatch], *, record: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Let routers choose the experts, or take the batch's routes. A critic's routers always choose."""
        if record:
            return self.replay.recorded()
        if batch.routes is None or self._chunks.has_value_head:
            return contextlib.nullcontext()
        return self.replay.given(batch, prepared)

    def forward_backward(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        options: PassOptions,
        *,
        taught: TargetsOfTeachers | None = None,
        reference: ParameterSwap | None = None,
    ) -> tuple[list[Mapping[str, Tensor]], dict[str, np.ndarray] | None]:
        """Accumulate gradients of the objective; return its metrics per micro-batch, and forward()'s arrays.

        Metrics are empty off the last stage. The arrays come from the same weights, with 0 for untrained
        tokens. The objective also sees the divergence from `taught`, and the log-probs of `reference`.
        """
        prepared = self._prepare(batch, all_tokens=False)
        self._scale_router_loss(prepared)
        ref = {} if reference is None else self._ref_logprobs(reference, batch, prepared, options.temperature)
        batch = batch.with_arrays(**ref)
        self.expert_load.clear()
        margins = self._infinite_margins(prepared) if options.with_router_margins else []
        outputs: list[dict[str, Tensor]] = []
        loss = self._objective_loss(batch, objective, denominators, options.temperature, outputs, taught)
        embedding = contextlib.nullcontext() if self._drafts is None else self._drafts.embedding()
        with self._choices(batch, prepared), embedding:
            metrics = self._run(prepared, loss, forward_only=False, margins=margins)
        arrays = self._arrays_of(batch, prepared, outputs, margins)
        return metrics, None if arrays is None else arrays | ref

    def _prepare(self, batch: TrainBatch, *, all_tokens: bool) -> list[DeviceMicrobatch]:
        """Pack the same number of micro-batches on all ranks, because expert parallelism couples them."""
        self._check_lengths(batch)
        limit, layout = self._training.microbatch_tokens, self._layout
        needed = count_microbatches(batch, max_tokens=limit, cp=layout.cp)
        agreed = max_over_world(needed, device=self._device)
        if layout.vpp > 1:
            agreed = -(-agreed // layout.pp) * layout.pp
        plans = pack_microbatches(
            batch, max_tokens=limit, num_microbatches=agreed, tp=layout.tp, cp=layout.cp
        )
        scored = batch.loss_mask.copy()
        if all_tokens:
            scored[:] = True
        scored[batch.cu_seqlens[:-1]] = False
        return [self._to_device(plan, batch.lengths(), scored, batch.sampling_masks) for plan in plans]

    def _scale_router_loss(self, prepared: list[DeviceMicrobatch]) -> None:
        """Make the load-balancing loss a mean over the step's tokens.

        Megatron multiplies each micro-batch's loss by the tokens of all its tensor- and context-parallel
        ranks (`Router.attach_and_log_load_balancing_loss`). It leaves the division by the step's tokens to
        its loss normalisation, which is off here: gradients are sums.
        """
        if not self._training.router_aux_loss:
            return
        total = torch.tensor(
            [sum(item.tokens.shape[1] for item in prepared)], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        scale = 1 / (self._layout.cp * float(total.item()))  # `tokens` are a context-parallel rank's share
        self._chunks.config.moe_aux_loss_coeff = self._training.router_aux_loss * scale

    def _check_lengths(self, batch: TrainBatch) -> None:
        lengths = batch.lengths()
        if len(lengths) and lengths.max() > self._chunks.max_length:
            worst = int(lengths.argmax())
            raise DataError(
                f"sample {batch.sample_ids[worst]} has {lengths[worst]} tokens, but model.max_length is "
                f"{self._chunks.max_length}; raise it or drop the sample before training"
            )

    def _to_device(
        self, plan: Microbatch, lengths: np.ndarray, scored: np.ndarray, masks: SamplingMasks | None
    ) -> DeviceMicrobatch:
        """Move a micro-batch to the device, of a batch with samples of `lengths` [S]; log-probs are computed
        of `scored` [N] bool tokens."""
        cp, rank = self._layout.cp, self._place.cp
        rows = np.flatnonzero(scored[plan.token_index])
        mine = rank_positions(plan.tree.lengths, cp=cp, rank=rank)
        local = np.full(len(plan.tokens), -1)
        local[mine] = np.arange(len(mine))
        before = local[plan.places[rows - 1]]  # a segment's first token is never scored
        own_rows = np.flatnonzero(before >= 0)
        targets = plan.tokens[plan.places[rows[own_rows]]]
        arrays = (plan.tokens[mine][None], rows, own_rows, before[own_rows], targets)
        tokens, *index = (torch.from_numpy(array).to(self._device) for array in arrays)
        packed = pack_segments(
            plan.tree,
            rotary=self._chunks.rotary,
            device=self._device,
            cp=cp,
            rank=rank,
            bucketed=core_attention(self._chunks.choice).bucketed,
            window=self._chunks.window,
        )
        own_index = plan.token_index[rows[own_rows]]
        kept = None
        if masks is not None:
            masks = masks.take(own_index)
            kept = Kept(masks.bounds(), torch.from_numpy(masks.tokens.astype(np.int32)).to(self._device))
        drafts = self._draft_tokens(plan, lengths, rows, local, mine) if self._drafts is not None else None
        return DeviceMicrobatch(
            plan, tokens, mine, packed, self._real(plan, mine), own_index, *index, kept=kept, drafts=drafts
        )

    def _draft_tokens(
        self, plan: Microbatch, lengths: np.ndarray, rows: np.ndarray, local: np.ndarray, mine: np.ndarray
    ) -> DraftTokens:
        """Locate a draft head's tokens; arguments as in _to_device()."""
        assert not plan.tree.shares, "a shared prefix's last state drafts by several samples' tokens"
        lengths = lengths[plan.samples]
        inside = np.arange(len(plan.places)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        following = np.full(len(plan.tokens), -1)
        known = np.flatnonzero(inside > 1)
        following[plan.places[known - 1]] = plan.tokens[plan.places[known]]
        is_drafted = inside[rows] > 1
        drafted = np.flatnonzero(is_drafted)
        before = local[plan.places[rows[drafted] - 2]]
        is_here = before >= 0
        drafted, before = drafted[is_here], before[is_here]
        arrays = (following[mine], drafted, before, plan.tokens[plan.places[rows[drafted]]], is_drafted)
        return DraftTokens(*(torch.from_numpy(array).to(self._device) for array in arrays))

    def _real(self, plan: Microbatch, mine: np.ndarray) -> Tensor:
        real = np.zeros(len(plan.tokens), bool)
        real[plan.places] = True
        return torch.from_numpy(real[mine]).to(self._device).chunk(self._layout.tp)[self._place.tp]

    def _run(
        self,
        prepared: list[DeviceMicrobatch],
        loss: Callable[..., Any],
        *,
        forward_only: bool,
        margins: list[Tensor],
    ) -> list[Any]:
        """Run Megatron's schedule over all micro-batches; lower `margins` to the routers' gaps."""
        routers = self._routers() if margins else []

        def forward_step(
            data: Iterator[tuple[int, DeviceMicrobatch]], model: Any
        ) -> tuple[Tensor, Callable[..., Any]]:
            number, item = next(data)
            counting = self.expert_load.counting(item.real)
            with counting, self.replay.microbatch(number), recorded_margins(routers) as gaps:
                hidden = model(item.tokens, None, None, packed_seq_params=item.packed)
            for gap in gaps:
                torch.minimum(margins[number], gap, out=margins[number])
            return hidden, functools.partial(loss, item)

        longest = max(item.tokens.shape[1] for item in prepared)
        iterators: list[Iterator[Any]] = [iter(enumerate(prepared)) for _ in self._models]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._models,
            num_microbatches=len(prepared),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_loss(self, temperature: float) -> Callable[..., Any]:
        def outputs(item: DeviceMicrobatch, hidden: Tensor, non_loss_data: bool = True) -> dict[str, Tensor]:
            return self._head.outputs(item, hidden, temperature)

        return outputs

    def _objective_loss(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        temperature: float,
        kept: list[dict[str, Tensor]],
        taught: TargetsOfTeachers | None,
    ) -> Callable[..., Any]:
        """Return the loss function of a micro-batch; it appends the output layer's arrays to `kept`."""

        def loss(item: DeviceMicrobatch, hidden: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            count = torch.zeros((), dtype=torch.int, device=self._device)
            drafted = None if self._drafts is None else self._drafts.logprobs(item, hidden, temperature)

            def zero_loss() -> Tensor:
                nothing = self._head.zero_loss(hidden)
                return nothing if drafted is None else nothing + drafted.sum() * 0.0

            if not len(item.rows):
                kept.append({})
                return zero_loss(), count, {}
            head_outputs = self._head.outputs(item, hidden, temperature, taught)
            kept.append({name: x.detach() for name, x in head_outputs.items()})
            size = len(item.plan.token_index)
            outputs = {name: scatter_rows(x, item.rows, size) for name, x in head_outputs.items()}
            arrays, segments = self._arrays(batch, item.plan)
            try:
                value, metrics = objective(
                    **outputs, arrays=arrays, segments=segments, denominators=denominators
                )
            except NotFiniteError as error:
                # Only this rank knows; its NaN loss makes all ranks skip the step.
                log.warning("optimizer step skipped: %s", error)
                nothing = zero_loss() * float("nan")
                return nothing, count, {"loss": nothing.detach()}
            reported = {"loss": value.detach()} | {name: metric.detach() for name, metric in metrics.items()}
            if drafted is not None:
                reported |= draft_metrics(item, drafted, head_outputs["logprobs"].detach(), denominators)
                value = value + draft_loss(drafted, denominators)
            return value, count, reported

        return loss

    def _arrays(self, batch: TrainBatch, plan: Microbatch) -> tuple[dict[str, Tensor], Segments]:
        index = plan.token_index
        arrays = {name: array[index] for name, array in batch.arrays.items()}
        arrays["loss_mask"] = batch.loss_mask[index]
        on_device = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        known = {name: values[plan.samples] for name, values in batch.samples.items()}
        known["group"] = batch.group_ids[plan.samples]
        lengths = batch.lengths()[plan.samples]
        return on_device, Segments.of(lengths, device=self._device, values=known)

    def _arrays_of(
        self,
        batch: TrainBatch,
        prepared: list[DeviceMicrobatch],
        outputs: list[dict[str, Tensor]],
        margins: list[Tensor],
    ) -> dict[str, np.ndarray] | None:
        """Return outputs and margins as [N] arrays in the batch's order; None on ranks without outputs."""
        arrays = self._flat_arrays(batch, prepared, outputs) if self._is_last else {}
        if margins:
            arrays["router_margin"] = self._prefix_margins(batch, prepared, margins)
        return arrays if self._returns_arrays else None

    def _flat_arrays(
        self, batch: TrainBatch, prepared: list[DeviceMicrobatch], outputs: list[dict[str, Tensor]]
    ) -> dict[str, np.ndarray]:
        names = ("values",) if self._chunks.has_value_head else ("logprobs", "entropy")
        flat = {name: np.zeros(batch.num_tokens, np.float32) for name in names}
        for item, values_of in zip(prepared, outputs, strict=True):
            index = item.plan.token_index[item.rows.cpu().numpy()]
            for name in flat.keys() & values_of.keys():
                flat[name][index] = values_of[name].float().cpu().numpy()
        return flat

    def _routers(self) -> list[RecordingRouter]:
        """Return the routers of the model's layers."""
        modules: Iterable[tuple[str, Any]] = (
            named for model in self._chunks.models for named in model.named_modules()
        )
        return [
            module
            for name, module in modules
            if isinstance(module, RecordingRouter) and not name.startswith(DRAFTS)
        ]

    def _infinite_margins(self, prepared: list[DeviceMicrobatch]) -> list[Tensor]:
        """Return infinite gaps [k / tp] per micro-batch, one per token of a router's input."""
        sizes = [item.tokens.shape[1] // self._layout.tp for item in prepared]
        return [torch.full((size,), float("inf"), device=self._device) for size in sizes]

    def _prefix_margins(
        self, batch: TrainBatch, prepared: list[DeviceMicrobatch], margins: list[Tensor]
    ) -> np.ndarray:
        """Return [N] smallest router gaps over all layers and the token's prefix, which predicts it."""
        flat = np.full(batch.num_tokens, np.inf, np.float32)
        for item, smallest in zip(prepared, margins, strict=True):
            gap = item.gather(smallest, fill=float("inf"), op=dist.ReduceOp.MIN)
            flat[item.plan.token_index] = gap
        return prefix_minimum(flat, batch.cu_seqlens)
