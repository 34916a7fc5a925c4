"""Our layers and what the weight sync computes, on the device in bfloat16, against float64; torch alone.

Shapes are those of a rank of Qwen3-30B-A3B on a GPU and a small part of them on CPU. Errors are
|out - reference| / |reference| (Frobenius); 1e-2 is what bfloat16 operands may cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.models.kernels import delta_rule
from mrl.models.kernels.attention import packed_attention
from mrl.models.kernels.buckets import segment_buckets
from mrl.models.kernels.experts import grouped_swiglu
from mrl.models.kernels.segment_tree import SegmentTree
from mrl.resharding.transfer import fp8
from mrl.resharding.wire.digest import weighted_sum
from mrl.training.logprobs import logprobs_and_entropy
from tests.gpu.figures import check, median_seconds, show

BFLOAT16_ERROR = 1e-2
SINKS_ERROR = 5e-2
"""Bound on the gradient of attention sinks: a sum over all tokens whose terms mostly cancel."""
_QUANTISED_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each kind is computed."""

    tokens: int
    hidden: int
    experts: int
    expert_width: int
    draws: int
    """Random distributions of tokens over experts."""
    vocabulary: int
    logprob_tokens: int
    attention_tokens: int
    longest_segment: int
    window: int
    delta_heads: int
    """Value heads of a gated delta net, twice its key heads."""
    delta_width: int
    quantised_rows: int
    digest_bytes: int


ON_GPU = Sizes(
    tokens=16384,
    hidden=2048,
    experts=16,
    expert_width=768,
    draws=50,
    vocabulary=151936,
    logprob_tokens=8192,
    attention_tokens=22528,
    longest_segment=4096,
    window=128,
    delta_heads=32,
    delta_width=128,
    quantised_rows=1 << 15,
    digest_bytes=1 << 30,
)
ON_CPU = Sizes(
    tokens=256,
    hidden=64,
    experts=8,
    expert_width=48,
    draws=5,
    vocabulary=1000,
    logprob_tokens=128,
    attention_tokens=300,
    longest_segment=90,
    window=16,
    delta_heads=4,
    delta_width=16,
    quantised_rows=300,
    digest_bytes=3 << 20,
)


@pytest.fixture
def sizes(device: torch.device) -> Sizes:
    torch.manual_seed(0)
    return ON_GPU if device.type == "cuda" else ON_CPU


def test_experts(device: torch.device, sizes: Sizes) -> None:
    """Grouped experts against one expert after the other: odd counts, empty experts, no token at all."""
    rng, error, dirty = np.random.default_rng(0), 0.0, 0
    inputs = [
        _random(device, sizes.experts, 2 * sizes.expert_width, sizes.hidden, scale=sizes.hidden**-0.5),
        _random(device, sizes.experts, sizes.hidden, sizes.expert_width, scale=sizes.expert_width**-0.5),
    ]
    for counts in _distributions(rng, sizes):
        tokens = int(counts.sum())
        hidden, probs = _random(device, tokens, sizes.hidden), torch.rand(tokens, device=device)
        per_expert = torch.from_numpy(counts).to(device)
        _poison(device, tokens * sizes.hidden)
        results = _with_gradients(grouped_swiglu, hidden, *inputs, per_expert, probs)
        expected = _with_gradients(_experts_in_turn, hidden, *inputs, per_expert, probs, wide=True)
        error = max(error, *(_error(a, b) for a, b in zip(results, expected, strict=True)))
        empty = torch.from_numpy(counts == 0).to(device)
        dirty += sum(int(grad[empty].count_nonzero()) for grad in results[2:4])
    check(
        error < BFLOAT16_ERROR, f"experts, {sizes.draws} draws: error of results, gradients", f"{error:.1e}"
    )
    check(dirty == 0, "experts without a token: gradients of exact zeros", f"{dirty} others")
    even = torch.full((sizes.experts,), sizes.tokens // sizes.experts, device=device)
    hidden, probs = _random(device, sizes.tokens, sizes.hidden), torch.rand(sizes.tokens, device=device)
    seconds = median_seconds(device, lambda: _with_gradients(grouped_swiglu, hidden, *inputs, even, probs))
    flops = 3 * 2 * sizes.tokens * 3 * sizes.hidden * sizes.expert_width
    show("experts, forward and backward", f"{1e3 * seconds:.2f} ms, {flops / seconds / 1e12:.1f} TFLOP/s")


def test_delta_nets(device: torch.device, sizes: Sizes) -> None:
    """The chunked gated delta rule: results against token by token, gradients against float64 chunks."""
    lengths, heads, width = _segments(sizes), sizes.delta_heads, sizes.delta_width
    tokens, chunks = int(lengths.sum()), delta_rule.chunk_segments(lengths, device=device)
    query, key = (_random(device, tokens, heads // 2, width) for _ in range(2))
    value = _random(device, tokens, heads, width)
    decay = -torch.rand(tokens, heads, device=device)
    beta = torch.rand(tokens, heads, device=device)

    def ours(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return delta_rule.gated_delta_rule(query, key, value, decay, beta, chunks)[0]

    inputs = (query, key, value, decay, beta)
    results = _with_gradients(ours, *inputs)
    expected = _with_gradients(ours, *inputs, wide=True)
    expected[0] = _delta_rule_in_turn(lengths, *(x.double() for x in inputs))
    worst = max(_error(a, b) for a, b in zip(results, expected, strict=True))
    check(worst < BFLOAT16_ERROR, "gated delta nets: error of results, gradients", f"{worst:.1e}")
    del results, expected
    used = _peak(device, lambda: _with_gradients(ours, *inputs))
    seconds = median_seconds(device, lambda: _with_gradients(ours, *inputs))
    name = f"gated delta nets, {tokens} tokens, forward and backward"
    show(name, f"{1e3 * seconds:.1f} ms, {used:.2f} GB more")


@pytest.mark.parametrize(
    ("name", "heads", "groups", "width", "value_width", "sinks", "windowed"),
    [
        ("attention", 32, 4, 128, 128, False, False),
        ("latent attention", 16, 16, 192, 128, False, False),
        ("attention with sinks", 16, 2, 64, 64, True, False),
        ("attention with sinks and a window", 16, 2, 64, 64, True, True),
    ],
)
def test_attention(device, sizes, name, heads, groups, width, value_width, sinks, windowed) -> None:
    """Packed attention: keys wider than values as DeepSeek has them, sinks and windows as gpt-oss."""
    window = sizes.window if windowed else 0
    lengths = _segments(sizes)
    tokens = int(lengths.sum())
    buckets = segment_buckets(
        SegmentTree.of_roots(lengths), dtype=torch.bfloat16, device=device, window=window
    )
    scale = 1 / math.sqrt(width)
    query, key = _random(device, tokens, heads, width), _random(device, tokens, groups, width)
    value = _random(device, tokens, groups, value_width)
    inputs = (query, key, value, *([_random(device, heads)] if sinks else []))

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return packed_attention(q, k, v, buckets, scale=scale, sinks=sinks, windowed=window > 0)

    def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        parts = zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True)
        return torch.cat([_dense_attention(q, k, v, sinks, scale=scale, window=window) for q, k, v in parts])

    results = _with_gradients(ours, *inputs)
    expected = _with_gradients(dense, *inputs, wide=True)
    errors = [_error(a, b) for a, b in zip(results, expected, strict=True)]
    check(max(errors[:4]) < BFLOAT16_ERROR, f"{name}: error of results, gradients", f"{max(errors[:4]):.1e}")
    if sinks:
        check(errors[4] < SINKS_ERROR, f"{name}: error of the sinks' gradient", f"{errors[4]:.1e}")
    del results, expected
    used = _peak(device, lambda: _with_gradients(ours, *inputs))
    seconds = median_seconds(device, lambda: _with_gradients(ours, *inputs))
    show(f"{name}, {tokens} tokens, forward and backward", f"{1e3 * seconds:.1f} ms, {used:.2f} GB more")


def test_logprobs(device: torch.device, sizes: Sizes) -> None:
    """Log-probs and entropy over a whole vocabulary, in chunks of tokens."""
    hidden = _random(device, sizes.logprob_tokens, sizes.hidden)
    weight = _random(device, sizes.vocabulary, sizes.hidden, scale=sizes.hidden**-0.5)
    targets = torch.randint(0, sizes.vocabulary, (sizes.logprob_tokens,), device=device)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        chosen, entropy = logprobs_and_entropy(
            hidden, weight, targets, vocab_size=sizes.vocabulary, temperature=0.7, chunk_tokens=1024
        )
        return chosen + 0.01 * entropy

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(
            [
                _dense_logprobs(h, weight, t)
                for h, t in zip(hidden.split(256), targets.split(256), strict=True)
            ]
        )

    few = slice(0, 1024)
    targets_of_all, targets = targets, targets[few]
    results, expected = (
        _with_gradients(ours, hidden[few], weight),
        _with_gradients(dense, hidden[few], weight, wide=True),
    )
    worst = max(_error(a, b) for a, b in zip(results, expected, strict=True))
    check(worst < BFLOAT16_ERROR, "log-probs and entropy: error of results, gradients", f"{worst:.1e}")
    del results, expected
    targets = targets_of_all
    used = _peak(device, lambda: _with_gradients(ours, hidden, weight))
    seconds = median_seconds(device, lambda: _with_gradients(ours, hidden, weight))
    name = f"log-probs, {sizes.logprob_tokens} tokens of {sizes.vocabulary} words, and backward"
    show(name, f"{1e3 * seconds:.1f} ms, {used:.2f} GB more")


def test_quantiser(device: torch.device, sizes: Sizes) -> None:
    """Float8 values and scales, bit for bit the CPU's."""
    weight = _random(device, sizes.quantised_rows, 1000) * torch.rand(1000, device=device).exp2().to(
        torch.bfloat16
    )
    weight[: 2 * _QUANTISED_BLOCK] = 0
    scales = fp8.block_scales(weight, _QUANTISED_BLOCK)
    made = fp8.values(weight, scales, _QUANTISED_BLOCK)
    on_cpu = fp8.block_scales(weight.cpu(), _QUANTISED_BLOCK)
    same = torch.equal(scales.cpu(), on_cpu) and torch.equal(
        made.cpu().view(torch.uint8), fp8.values(weight.cpu(), on_cpu, _QUANTISED_BLOCK).view(torch.uint8)
    )
    seconds = median_seconds(
        device, lambda: fp8.values(weight, fp8.block_scales(weight, _QUANTISED_BLOCK), _QUANTISED_BLOCK)
    )
    check(
        same,
        "float8 values and scales are the CPU's, bit for bit",
        f"{weight.nbytes / seconds / 1e9:.0f} GB/s read",
    )


def test_digests_of_device_memory(device: torch.device, sizes: Sizes) -> None:
    """The fingerprint of device memory, against the CPU's arithmetic, at odd lengths and offsets."""
    data = torch.randint(0, 256, (sizes.digest_bytes,), dtype=torch.uint8, device=device)
    pieces = [data[first : first + size] for first, size in ((0, 1 << 20), (1, 99_999), (8, 262_144), (3, 7))]
    same = all(weighted_sum(piece) == weighted_sum(piece.cpu()) for piece in pieces)
    seconds = median_seconds(device, lambda: weighted_sum(data))
    check(same, "digests of device memory are the CPU's", f"{data.numel() / seconds / 1e9:.0f} GB/s")


# -- references --------------------------------------------------------------------------------------------


def _experts_in_turn(
    hidden: Tensor, weight1: Tensor, weight2: Tensor, per_expert: Tensor, probs: Tensor
) -> Tensor:
    parts, probs_of = hidden.split(per_expert.tolist()), probs.split(per_expert.tolist())
    outputs = []
    for part, prob, first, second in zip(parts, probs_of, weight1, weight2, strict=True):
        gate, up = (part @ first.t()).chunk(2, dim=-1)
        outputs.append((torch.nn.functional.silu(gate) * up * prob[:, None]) @ second.t())
    return torch.cat(outputs)


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float, window: int
) -> Tensor:
    """q [n, H, D], k [n, G, D], v [n, G, V] of one segment, sinks [H] -> [n, H x V]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    if window:
        later |= torch.ones_like(later).tril(-window)
    scores = scores.masked_fill(later, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hij,jhv->ihv", weights, v).flatten(1)


def _delta_rule_in_turn(
    lengths: np.ndarray, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """Return outputs [N, H, V] of delta_net.gated_delta_step() at each token, all segments at once."""
    starts = torch.from_numpy(np.cumsum(lengths) - lengths).to(value.device)
    sizes = torch.from_numpy(lengths).to(value.device)
    outputs = torch.empty_like(value)
    states = value.new_zeros(len(lengths), value.shape[1], key.shape[2], value.shape[2])
    for place in range(int(lengths.max())):
        rows = (sizes > place).nonzero().squeeze(1)
        at = starts[rows] + place
        outputs[at], states[rows] = delta_rule.gated_delta_step(
            query[at], key[at], value[at], decay[at], beta[at], states[rows]
        )
    return outputs


def _dense_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    all_of_them = (hidden @ weight.t() / 0.7).log_softmax(-1)
    entropy = -(all_of_them.exp() * all_of_them).sum(-1)
    return all_of_them.gather(1, targets[:, None])[:, 0] + 0.01 * entropy


# -- measuring ---------------------------------------------------------------------------------------------


def _random(device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=device)).to(torch.bfloat16)


def _distributions(rng: np.random.Generator, sizes: Sizes) -> Iterator[np.ndarray]:
    """Yield tokens per expert: all on one, none, then random ones with about half of the experts empty."""
    yield np.eye(1, sizes.experts, dtype=np.int64)[0] * 37
    yield np.zeros(sizes.experts, np.int64)
    for _ in range(sizes.draws - 2):
        odd = rng.integers(0, 2 * sizes.tokens // sizes.experts // 8, sizes.experts)
        yield odd * rng.integers(0, 2, sizes.experts)


def _segments(sizes: Sizes) -> np.ndarray:
    """Return lengths that add up to `attention_tokens`."""
    rng, lengths = np.random.default_rng(1), []
    while (left := sizes.attention_tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(rng.integers(1, sizes.longest_segment))))
    return np.array(lengths)


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor, wide: bool = False) -> list[Tensor]:
    """Return the result and its gradients by floating-point inputs, at fixed weights; `wide`: float64."""
    leaves = []
    for tensor in inputs:
        real = tensor.double() if wide and tensor.is_floating_point() else tensor
        leaves.append(real.detach().requires_grad_(tensor.is_floating_point()))
    result = function(*leaves)
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64, device=result.device).view_as(result)
    grads = torch.autograd.grad(
        result, [x for x in leaves if x.requires_grad], weights.to(result.dtype), allow_unused=True
    )
    return [result.detach(), *(g if g is not None else torch.zeros(1, device=result.device) for g in grads)]


def _error(ours: Tensor, expected: Tensor) -> float:
    """Return |ours - expected| / |expected|, or |ours| if nothing or zeros are expected. NaN stays NaN."""
    norm = expected.double().norm()
    difference = (
        (ours.double() - expected.double()).norm() if ours.shape == expected.shape else ours.double().norm()
    )
    value = float(difference / norm) if norm > 0 else float(difference)
    return value if math.isfinite(value) else math.inf


def _poison(device: torch.device, elements: int) -> None:
    """Leave NaN in memory that is allocated next."""
    for _ in range(4):
        torch.full((max(elements, 1),), math.nan, dtype=torch.bfloat16, device=device)


def _peak(device: torch.device, action: Callable[[], object]) -> float:
    """Return the GB that the action takes beyond those in use; 0 on CPU, which does not count."""
    if device.type != "cuda":
        action()
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9
