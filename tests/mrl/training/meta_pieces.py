"""Pieces of a rank's work on a microbatch, on "meta": passes, kernels, objectives, routes, adapters.

Each is a function without arguments, run inside OnMeta; tables separate those that may make the host wait.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mrl.algorithms import correction_weights, kl
from mrl.algorithms.objective import Objective, ValueObjective, cross_entropy
from mrl.algorithms.preference import PAIR_LOSSES, PreferenceObjective
from mrl.algorithms.reward_model_objective import RewardModelObjective
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.correction import CORRECTION_KINDS, NoCorrection
from mrl.config.sections.distillation import TEACHER, DistillationSection
from mrl.config.sections.policy_loss import LOSS_NAMES
from mrl.config.sections.tune import ObjectiveSection
from mrl.models.adapters import Adapter, Half
from mrl.models.kernels.attention import packed_attention
from mrl.models.kernels.buckets import segment_buckets
from mrl.models.kernels.delta_rule import gated_delta_rule, gates, short_convolution
from mrl.models.kernels.experts import Biases, Clamped, grouped_clamped, grouped_swiglu
from mrl.models.kernels.rotary import RotaryTable, rotate, rotate_pairs
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.models.kernels.slots import to_slots
from mrl.models.kernels.zigzag import padded
from mrl.models.layout import Layout
from mrl.models.megatron.delta_net_layer import GatedNorm
from mrl.models.megatron.layer_choice import LayerChoice
from mrl.models.megatron.layer_modules import RecordingRouter, RMSNorm
from mrl.models.megatron.lora_parameters import LowRankPair
from mrl.models.megatron.packed_segments import PackedSegments
from mrl.models.megatron.projection_norm import ProjectionNorm
from mrl.models.megatron.replay import ReplayedRouting
from mrl.models.rope import Rope
from mrl.routes import RouteRows, Routes
from mrl.samples import TrainBatch
from mrl.training.device_microbatch import DeviceMicrobatch
from mrl.training.divergence import Vocabulary
from mrl.training.output_layer import OutputLayer
from mrl.training.packing import pack_microbatches
from mrl.training.passes import Passes
from mrl.training.replay import Replay
from mrl.training.teacher_targets import TargetsOfTeachers
from tests.support.meta_mode import META
from tests.tiny_models import random_batch

HIDDEN, HEADS, GROUPS, WIDTH = 64, 8, 2, 64
EXPERTS, TOPK, LAYERS = 16, 4, 2
VOCAB, CHUNK, WINDOW = 2000, 4096, 128
LONGEST = 4096
BATCH = random_batch(6, seed=1, longest=LONGEST)
MOST = 2 * BATCH.num_tokens * HEADS * WIDTH
"""Limit on one tensor's elements: above a layer's activations, below a segment's pairs and all logits."""
MOST_PREPARED = 2 * BATCH.num_tokens * WIDTH
"""The same limit before heads exist, for all microbatches of a pass at once."""
assert min(int(BATCH.lengths().max()) ** 2, BATCH.num_tokens * VOCAB) > MOST
LAYOUTS = {
    "local": (Layout(), LayerChoice(False), 0),
    "window": (Layout(), LayerChoice(False), WINDOW),
    "transformer engine": (Layout(tp=2, cp=4), LayerChoice(True), 0),
}
"""Layout, layers and window of a rank; with context parallelism our own attention masks all pairs (CPU)."""


ROTARY = RotaryTable(Rope(1e4, WIDTH), max_length=2 * LONGEST, dtype=torch.bfloat16, device=META)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META, requires_grad=trained)


def once[M: torch.nn.Module](make: Callable[[], M]) -> M:
    """Build a module outside the mode, as its parameters exist long before a microbatch."""
    with _disable_current_modes():
        return make().to(META)


def passes(layout: Layout, choice: LayerChoice, window: int, *, has_value_head: bool = False) -> Passes:
    """Return rank 0's passes with an output layer and stand-ins for their process groups."""
    head, of_values = made(VOCAB, HIDDEN), made(HIDDEN, dtype=torch.float32)
    last = types.SimpleNamespace(head_weight=lambda: head, values=lambda hidden: hidden.float() @ of_values)
    rank = object.__new__(Passes)
    rank._layout, rank._place, rank._device, rank._is_last = layout, layout.coordinates(0), META, True
    rank._chunks = types.SimpleNamespace(  # type: ignore[assignment]
        rotary=ROTARY,
        choice=choice,
        window=window,
        models=[last],
        vocab_size=VOCAB - 1,
        has_value_head=has_value_head,
        config=types.SimpleNamespace(moe_aux_loss_coeff=0.0),
    )
    rank._training = types.SimpleNamespace(logprob_chunk_tokens=CHUNK, router_aux_loss=1e-3)  # type: ignore
    rank._drafts = None
    rank._head = object.__new__(OutputLayer)
    rank._head._chunks, rank._head._layout, rank._head._chunk_tokens = rank._chunks, layout, CHUNK
    rank._head._tp_group, rank._head._cp_group = types.SimpleNamespace(rank=lambda: 0), None
    return rank


def prepared(rank: Passes, batch: TrainBatch) -> DeviceMicrobatch:
    layout = rank._layout
    (plan,) = pack_microbatches(batch, max_tokens=1 << 30, num_microbatches=1, tp=layout.tp, cp=layout.cp)
    scored = np.ones(batch.num_tokens, bool)
    scored[batch.cu_seqlens[:-1]] = False
    item = rank._to_device(plan, batch.lengths(), scored, batch.sampling_masks)
    item.packed.angles = None  # a table of all positions, made once
    return item


def read(batch: TrainBatch = BATCH) -> TrainBatch:
    """Return the batch with every array that an objective may read."""
    tokens = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "returns", "values", "scores")
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=batch.num_tokens).astype(np.float32) for name in tokens}
    arrays["age"] = np.zeros(batch.num_tokens, np.float32)
    count = batch.num_samples
    samples = {name: np.ones(count) for name in ("margin", "probability", "ref_logprob")}
    samples |= {"side": np.arange(count)[::-1] % 2.0, TEACHER: np.zeros(count, np.int64)}
    return TrainBatch(
        batch.tokens,
        batch.cu_seqlens,
        batch.loss_mask,
        batch.group_ids,
        batch.sample_ids,
        dict(batch.arrays) | arrays,
        samples=samples,
    )


COUNTS = {"num_tokens": 9.0, "num_sequences": 6.0, "num_fresh_tokens": 9.0, "num_taught_tokens": 9.0}
ROWS = {"num_rows": 3.0, "kto_z": 0.5, "num_chosen": 3.0, "num_rejected": 3.0, "score_sum": 1.0}


def objective_step(
    objective: Callable[..., Any], *, taught: Any = None, has_value_head: bool = False
) -> None:
    """Run the loss of a microbatch from hidden states, and its backward pass."""
    rank, batch = passes(*LAYOUTS["local"], has_value_head=has_value_head), read()
    item = prepared(rank, batch)
    kept: list[dict[str, Tensor]] = []
    loss = rank._objective_loss(batch, objective, COUNTS | ROWS, 0.7, kept, taught)
    value, _, _ = loss(item, made(item.tokens.shape[1], 1, HIDDEN))
    value.backward()


def prepare(name: str) -> None:
    rank, batch = passes(*LAYOUTS[name]), read()
    item = prepared(rank, batch)
    rank._arrays(batch, item.plan)
    rank._infinite_margins([item])


def context_parallel_outputs() -> None:
    layout, choice, window = LAYOUTS["transformer engine"]
    rank = passes(Layout(cp=layout.cp), choice, window)
    item = prepared(rank, BATCH)
    outputs = rank._head.outputs(item, made(item.tokens.shape[1], 1, HIDDEN), 0.7)
    outputs["logprobs"].sum().backward()


def attention(window: int, *, sinks: bool) -> None:
    rank = passes(Layout(), LayerChoice(False), window)
    packed: PackedSegments = prepared(rank, BATCH).packed
    assert packed.buckets is not None
    count = BATCH.num_tokens
    query, key, value = (made(count, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    turned = [rotate(tensor, packed.cos, packed.sin) for tensor in (query, key)]
    rotate_pairs(query, packed.cos, packed.sin)
    extra = made(HEADS) if sinks else None
    packed_attention(
        turned[0], turned[1], value[..., :32], packed.buckets, scale=0.1, sinks=extra, windowed=window > 0
    ).sum().backward()


def masked_attention() -> None:
    """Attend as a context-parallel rank, whose masks cover all pairs: short segments here."""
    lengths, cp = padded(np.array([100, 7]), 2), 2
    buckets = segment_buckets(
        SegmentTree.of_roots(lengths), dtype=torch.bfloat16, device=META, cp=cp, window=WINDOW
    )
    count = int(lengths.sum())
    query, key, value = made(count // cp, HEADS, WIDTH), *(made(count, GROUPS, WIDTH) for _ in range(2))
    for windowed in (False, True):
        packed_attention(query, key, value, buckets, scale=0.1, windowed=windowed).sum().backward()


def no_correction() -> None:
    """Compute the weights of no correction, which objectives skip."""
    mask = torch.empty(9, dtype=torch.bool, device=META)
    tokens: Any = types.SimpleNamespace(mask=mask, old_logprobs=made(9))
    correction_weights.weights(NoCorrection(), tokens, made(9))


def delta_net() -> None:
    packed, count = prepared(passes(*LAYOUTS["local"]), BATCH).packed, BATCH.num_tokens
    query, key, value = (made(count, heads, WIDTH // 2) for heads in (1, 1, 2))
    mixed = short_convolution(made(count, 3 * WIDTH), made(3 * WIDTH, 4), packed.positions)
    decay, beta = gates(made(count, 2), made(count, 2), made(2), made(2))
    out, _ = gated_delta_rule(query, key, value, decay, beta, packed.chunks)
    normed = once(lambda: GatedNorm(_config(), WIDTH // 2))(out, out)
    (normed.sum() + mixed.sum()).backward()
    order = prepared(passes(*LAYOUTS["transformer engine"]), BATCH).packed.zigzag
    put = to_slots(made(len(order.rows), HEADS // 2 * WIDTH), order.rows, order.tokens)
    put.sum().backward()


def experts(*, clamped: bool, tokens: int = BATCH.num_tokens) -> None:
    hidden, probs = made(tokens, HIDDEN), made(tokens, dtype=torch.float32)
    first, second = made(EXPERTS, 32, HIDDEN), made(EXPERTS, HIDDEN, 16)
    counts = torch.empty(EXPERTS, dtype=torch.int64, device=META)
    if clamped:
        biases = Biases(made(EXPERTS, 32), made(EXPERTS, HIDDEN))
        out = grouped_clamped(hidden, first, second, biases, counts, probs, Clamped(1.7, 7.0))
    else:
        out = grouped_swiglu(hidden, first, second, counts, probs)
    out.square().sum().backward()


def _config() -> Any:
    return types.SimpleNamespace(
        layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        params_dtype=torch.bfloat16,
        sequence_parallel=False,
    )


def norms() -> None:
    hidden = made(BATCH.num_tokens, HEADS, WIDTH)
    once(lambda: RMSNorm(_config(), WIDTH))(hidden).sum().backward()
    of_heads = once(lambda: ProjectionNorm(heads=HEADS, config=_config(), hidden_size=WIDTH))
    of_heads(hidden).sum().backward()


def margins(score_function: str, groups: int | None, topk: int) -> None:
    config = types.SimpleNamespace(moe_router_num_groups=groups, moe_router_group_topk=groups and 2)
    bias = made(EXPERTS, trained=False) if score_function == "sigmoid" else None
    router: Any = types.SimpleNamespace(
        score_function=score_function, topk=topk, expert_bias=bias, config=config
    )
    RecordingRouter._smallest_gap(router, made(BATCH.num_tokens, EXPERTS))


def _routers() -> list[Any]:
    biases = (made(EXPERTS, dtype=torch.float32, trained=False) for _ in range(LAYERS))
    return [
        types.SimpleNamespace(layer_number=1 + n, expert_bias=bias, router_replay=None, margins=None)
        for n, bias in enumerate(biases)
    ]


def _choose(scores: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
    return scores.topk(topk, dim=1)


def _replay(routers: list[Any]) -> Replay:
    config = types.SimpleNamespace(
        num_layers=LAYERS,
        moe_layer_freq=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_fusion=False,
    )
    return Replay(routers, config, tp=1, tp_rank=0, device=META)  # type: ignore[arg-type]


def _visit(routers: list[Any], kind: type) -> None:
    for router in routers:
        assert isinstance(router.router_replay, kind)
        router.router_replay.get_replay_topk(
            made(BATCH.num_tokens, EXPERTS, dtype=torch.float32), TOPK, None, None, _choose
        )


def given_routes() -> None:
    rows = [
        Routes((RouteRows(np.zeros((length - 1, LAYERS, TOPK), np.uint8), 0, length - 1),))
        for length in BATCH.lengths().tolist()
    ]
    batch = TrainBatch(
        BATCH.tokens, BATCH.cu_seqlens, BATCH.loss_mask, BATCH.group_ids, BATCH.sample_ids, routes=tuple(rows)
    )
    routers = _routers()
    replay = _replay(routers)
    item = prepared(passes(*LAYOUTS["local"]), batch)
    with replay.given(batch, [item]), replay.microbatch(0):
        _visit(routers, ReplayedRouting)


def adapter() -> None:
    """Merge two experts' pairs and compute their part of the weight's gradient."""
    halves = [
        Half(types.SimpleNamespace(shape=shape, pieces=()), {}, True, (0, 0, 0))  # type: ignore[arg-type]
        for shape in ((8, HIDDEN), (64, 4))
    ]
    base = torch.nn.Parameter(made(64, HIDDEN))
    pair = once(lambda: LowRankPair(Adapter("w", 0, 2, True, *halves), base, scale=2.0, seed=0))
    for half in (pair.a, pair.b):
        half.main_grad = made(*half.shape, dtype=torch.float32, trained=False)
    pair.merge()
    pair.follow_gradients()
    base.float().sum().backward()


def lessons(section: DistillationSection, *, split: bool) -> None:
    """Run a teacher's pass, and the policy's loss from its targets."""
    rank = passes(*LAYOUTS["local"])
    rank._run = lambda items, keep, **options: [keep(items[0], made(items[0].tokens.shape[1], 1, HIDDEN))]
    rank._prepare = lambda batch, all_tokens: [prepared(rank, batch)]  # type: ignore[method-assign]
    vocabulary = Vocabulary(VOCAB - 1, 0.7, CHUNK, types.SimpleNamespace() if split else None)
    positions = np.arange(BATCH.num_samples - 1)
    lesson = rank.lesson(read(), positions)
    assert lesson is not None
    item = prepared(rank, read())
    states = made(len(item.own_index), HIDDEN)
    TargetsOfTeachers(section, [lesson]).divergence(
        item.own_index, states, rank._head.weight, vocabulary
    ).sum().backward()


def distilled_loss() -> None:
    section = AlgorithmSection.model_validate({"distillation": {"teachers": {"default": "one"}}})
    assert section.distillation is not None
    taught = types.SimpleNamespace(divergence=lambda places, states, head, vocabulary: states.float().sum(-1))
    objective_step(Objective(section), taught=taught)


def _policies() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in LOSS_NAMES:
        if name != "custom":
            yield f"loss {name}", {"loss": {"name": name}}
    yield "loss ppo_clip with dual_clip", {"loss": {"name": "ppo_clip", "dual_clip": 3.0}}
    for kind in get_args(CORRECTION_KINDS):
        yield f"correction {kind}", {"correction": {"kind": kind}}
    for kind in kl.KINDS:
        section = {"location": "loss", "kind": kind, "coefficient": 0.1, "unbiased": True}
        yield f"kl {kind}", {"kl": section, "entropy": {"coefficient": 0.1}}
    for mode, extra in (("token_mean", {}), ("sequence_mean", {}), ("constant", {"length": 8})):
        yield f"aggregation {mode}", {"aggregation": {"mode": mode} | extra, "old_logprobs": "rollout"}


def _tuned() -> Iterator[tuple[str, Callable[[], None]]]:
    needs: dict[str, dict[str, Any]] = {
        "ipo": {"length": "sum"},
        "exo": {"smoothing": 0.1},
        "robust": {"smoothing": 0.1},
    }
    for name in (*PAIR_LOSSES, "kto"):
        section = ObjectiveSection(name=name, **needs.get(name, {}))  # type: ignore[arg-type]
        yield f"tune {name}", lambda section=section: objective_step(PreferenceObjective(section))
    for kind in (None, "pair", "batch_sum", "batch_mean"):
        center = None if kind is None else {"kind": kind, "weight": 0.01}
        section = ObjectiveSection.model_validate({"name": "reward_model", "center": center})
        yield (
            f"tune reward_model {kind}",
            lambda section=section: objective_step(RewardModelObjective(section), has_value_head=True),
        )
    for by in (False, True):
        sft = functools.partial(cross_entropy, by_sequence=by)
        yield (f"tune sft {'sequences' if by else 'tokens'}", lambda sft=sft: objective_step(sft))


def _lessons() -> Iterator[tuple[str, Callable[[], None]]]:
    for kind, split in itertools.product(("reverse", "forward", "jsd"), (False, True)):
        section = DistillationSection.model_validate({"teachers": {"default": "one"}, "divergence": kind})
        name = f"lessons {kind}{' split' if split else ''}"
        yield name, lambda section=section, split=split: lessons(section, split=split)


ONE_WAIT: dict[str, Callable[[], None]] = {
    **{
        name: lambda section=section: objective_step(Objective(AlgorithmSection.model_validate(section)))
        for name, section in _policies()
    },
    **{
        f"critic, clip {clip}": lambda clip=clip: objective_step(
            ValueObjective(AlgorithmSection.model_validate({"value_clip": clip})), has_value_head=True
        )
        for clip in (None, 0.2)
    },
    **dict(_tuned()),
    "distilled loss": distilled_loss,
}
"""Objectives, which check their inputs: there the host waits for the device, once."""

PREPARED: dict[str, Callable[[], None]] = {
    f"prepare {name}": lambda name=name: prepare(name) for name in LAYOUTS
}
"""What is made of every microbatch of a pass before the first one runs."""

NO_WAIT: dict[str, Callable[[], None]] = {
    "context parallel outputs": context_parallel_outputs,
    "attention": lambda: attention(0, sinks=False),
    "attention with sinks": lambda: attention(0, sinks=True),
    "windowed attention with sinks": lambda: attention(WINDOW, sinks=True),
    "masked attention": masked_attention,
    "no correction": no_correction,
    "delta net": delta_net,
    "experts": lambda: experts(clamped=False),
    "no token for the experts": lambda: experts(clamped=False, tokens=0),
    "clamped experts": lambda: experts(clamped=True),
    "norms": norms,
    "margins": lambda: margins("softmax", None, TOPK),
    "margins of groups": lambda: margins("sigmoid", 4, TOPK),
    "margins of all experts": lambda: margins("softmax", None, EXPERTS),
    "given routes": given_routes,
    "adapter": adapter,
    **dict(_lessons()),
}
