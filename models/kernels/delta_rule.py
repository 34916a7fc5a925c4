"""The gated delta rule (arXiv 2412.06464) and its short convolution over packed segments, in torch alone.

Every value head has a state [K, V] that starts at 0 with each segment. At each token it decays, and its key's
value is moved towards the token's by beta. As in arXiv 2406.06484 the tokens of a chunk are computed together:
one triangular system gives what each of them writes, and only chunks follow one another. Chunks of all
segments are computed at once, in float32 or wider. The module around it is models/megatron/delta_net_layer.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from mrl.models.delta_net import CHUNK
from mrl.models.kernels.slots import to_slots, to_tokens

EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """Where tokens stand in chunks, each of one segment. Round i holds chunk i of every segment that has one,
    longest segments first; the chunks of all rounds follow one another."""

    slot_tokens: Tensor
    """[C x CHUNK] int64: the token in each slot; padding at the end of a segment repeats token 0."""
    filled: Tensor
    """[C x CHUNK] bool: whether the slot holds a token."""
    token_slots: Tensor
    """[N] int64: the slot of each token."""
    rounds: tuple[int, ...]
    """Chunks of each round, never increasing."""
    order: Tensor
    """[B] int64: the segments, as the rounds have them."""


def chunk_segments(lengths: np.ndarray, *, device: torch.device) -> Chunks:
    """The chunks of segments of the given lengths [B] (at least 1 each), which follow one another."""
    counts = -(-lengths // CHUNK)
    order = np.argsort(-counts, kind="stable")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rounds = [int((counts > number).sum()) for number in range(int(counts.max()))]
    owners = np.concatenate([order[:size] for size in rounds])
    inside = np.repeat(np.arange(len(rounds)), rounds)[:, None] * CHUNK + np.arange(CHUNK)
    filled = inside < lengths[owners][:, None]
    slot_tokens = np.where(filled, starts[owners][:, None] + inside, 0)
    token_slots = np.zeros(int(starts[-1]), np.int64)
    token_slots[slot_tokens[filled]] = np.flatnonzero(filled)
    found = (torch.from_numpy(array).to(device) for array in (slot_tokens.ravel(), filled.ravel()))
    return Chunks(
        *found,
        token_slots=torch.from_numpy(token_slots).to(device),
        rounds=tuple(rounds),
        order=torch.from_numpy(order).to(device),
    )


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: Chunks,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(outputs [N, H, V] in the type of `value`, states [B, H, K, V] after each segment).

    `query`, `key` [N, G, K] of any length, `value` [N, H, V]; value head h reads key head h // (H / G). `decay`
    [N, H] is the logarithm of what a state keeps, at most 0; `beta` [N, H] lies in 0..1. `states` are those
    before the segments, zeros when absent; those returned are in float32 or wider.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    shares = value.shape[1] // key.shape[1]
    query, key = (_unit(x.to(dtype)).repeat_interleave(shares, dim=1) for x in (query, key))
    query = query * key.shape[-1] ** -0.5
    q, k, v = (_chunked(x, chunks) for x in (query, key, value.to(dtype)))
    kept = chunks.filled.view(-1, 1, CHUNK)
    log_decay, beta = (_chunked(x.to(dtype), chunks).where(kept, 0.0) for x in (decay, beta))

    total = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    inputs, writes = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    system, scores = (inputs @ k.mT) * between, (q @ k.mT) * between
    since = total.exp().unsqueeze(-1)
    both = torch.cat((writes, inputs * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    until_end = (total[..., -1:] - total).exp().unsqueeze(-1)

    if states is None:
        states = v.new_zeros(len(chunks.order), v.shape[1], k.shape[-1], v.shape[-1])
    columns = (q * since, scores, writes, reads, k * until_end, since[:, :, -1:])
    outputs, ended = _scan(columns, states.to(dtype)[chunks.order], chunks.rounds)
    tokens = to_tokens(outputs.transpose(1, 2).flatten(0, 1), chunks.token_slots)
    return tokens.to(value.dtype), ended[chunks.order.argsort()]


def _scan(columns: tuple[Tensor, ...], states: Tensor, rounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(outputs [C, H, CHUNK, V], states after each segment) of what gated_delta_rule() makes of each chunk."""
    outputs, ended = [], []
    for query, scores, writes, reads, key, kept in zip(*(x.split(rounds) for x in columns), strict=True):
        ended.append(states[len(query) :])
        states = states[: len(query)]
        written = writes - reads @ states
        outputs.append(query @ states + scores @ written)
        states = states * kept + key.mT @ written
    return torch.cat(outputs), torch.cat([states, *reversed(ended)])


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """gated_delta_rule() of segments of one token each: N is B, and all states [B, H, K, V] are given."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    shares = value.shape[1] // key.shape[1]
    query, key = (_unit(x.to(dtype)).repeat_interleave(shares, dim=1).unsqueeze(2) for x in (query, key))
    states = states.to(dtype) * decay.to(dtype).exp()[..., None, None]
    written = (value.to(dtype).unsqueeze(2) - key @ states) * beta.to(dtype)[..., None, None]
    states = states + key.mT @ written
    output = query * key.shape[-1] ** -0.5 @ states
    return output.squeeze(2).to(value.dtype), states


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(decay, beta) [N, H] of the projections `a`, `b` [N, H] and the parameters `a_log`, `dt_bias` [H]."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    decay = -a_log.to(dtype).exp() * functional.softplus(a.to(dtype) + dt_bias.to(dtype))
    return decay, b.sigmoid()


def short_convolution(x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """SiLU of a causal convolution along the tokens: x [N, C], `weight` [C, W], one filter a channel -> [N, C].

    `places` [N] are the tokens' places inside their segments: before a segment's first token all is 0. The
    last column of a filter meets the token itself.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, filters = x.to(dtype), weight.to(dtype)
    total = wide * filters[:, -1]
    for back in range(1, min(weight.shape[1], len(x))):
        earlier = functional.pad(wide[:-back], (0, 0, back, 0)) * filters[:, -1 - back]
        total = total + earlier.where((places >= back).unsqueeze(1), 0.0)
    return functional.silu(total).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, in the form of the reference's kernels."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def _chunked(x: Tensor, chunks: Chunks) -> Tensor:
    """[N, H, ...] -> [C, H, CHUNK, ...]."""
    slots = to_slots(x, chunks.slot_tokens, chunks.token_slots)
    return slots.unflatten(0, (-1, CHUNK)).transpose(1, 2)
