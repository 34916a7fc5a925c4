"""Compute the gated delta rule (arXiv 2412.06464) and its short convolution over packed segments, in torch
alone.

Every value head has a state [K, V] that starts at 0 with each segment. At each token the state decays, and
the value stored under the token's key moves towards the token's value by beta. As in arXiv 2406.06484 the
tokens of a chunk are computed together: one triangular system gives what each of them writes, and only chunks
are sequential. Chunks of all segments are computed at once, in float32 or wider. The surrounding module is
models/megatron/delta_net_layer.py.
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
"""Added to the squared norm of queries and keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """Positions of tokens in chunks, each of one segment. Round i has chunk i of every segment that is long
    enough, longest segments first; the chunks of all rounds are concatenated."""

    slot_tokens: Tensor
    """[C x CHUNK] int64: token in each slot; padding at the end of a segment repeats token 0."""
    filled: Tensor
    """[C x CHUNK] bool: True if the slot has a token."""
    token_slots: Tensor
    """[N] int64: slot of each token."""
    rounds: tuple[int, ...]
    """Chunks of each round, never increasing."""
    order: Tensor
    """[B] int64: segments in the order of the rounds."""


def chunk_segments(lengths: np.ndarray, *, device: torch.device) -> Chunks:
    """Return the chunks of consecutive segments of lengths [B] (at least 1 each)."""
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
    tensors = (torch.from_numpy(array).to(device) for array in (slot_tokens.ravel(), filled.ravel()))
    return Chunks(
        *tensors,
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
    """Return (outputs [N, H, V] in the type of `value`, states [B, H, K, V] after each segment).

    `query`, `key` [N, G, K] may have any norm; `value` is [N, H, V]; value head h reads key head h // (H /
    G). `decay` [N, H] is the logarithm of the share of a state that is kept, at most 0; `beta` [N, H] is in
    0..1. `states` are those before the segments, zeros if None; returned ones are float32 or wider.
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
    """Return (outputs [C, H, CHUNK, V], states after each segment) from the terms of each chunk."""
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
    """Apply gated_delta_rule() to segments of one token: N is B; all states [B, H, K, V] are given."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    shares = value.shape[1] // key.shape[1]
    query, key = (_unit(x.to(dtype)).repeat_interleave(shares, dim=1).unsqueeze(2) for x in (query, key))
    states = states.to(dtype) * decay.to(dtype).exp()[..., None, None]
    written = (value.to(dtype).unsqueeze(2) - key @ states) * beta.to(dtype)[..., None, None]
    states = states + key.mT @ written
    output = query * key.shape[-1] ** -0.5 @ states
    return output.squeeze(2).to(value.dtype), states


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (decay, beta) [N, H] of projections `a`, `b` [N, H] and parameters `a_log`, `dt_bias` [H]."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    decay = -a_log.to(dtype).exp() * functional.softplus(a.to(dtype) + dt_bias.to(dtype))
    return decay, b.sigmoid()


def short_convolution(x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """Apply a causal convolution along tokens, then SiLU: x [N, C], `weight` [C, W] (one filter per channel)
    -> [N, C].

    `places` [N] are the tokens' positions inside their segments: inputs before a segment are 0. The last
    column of a filter applies to the token itself.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, filters = x.to(dtype), weight.to(dtype)
    total = wide * filters[:, -1]
    for back in range(1, min(weight.shape[1], len(x))):
        earlier = functional.pad(wide[:-back], (0, 0, back, 0)) * filters[:, -1 - back]
        total = total + earlier.where((places >= back).unsqueeze(1), 0.0)
    return functional.silu(total).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Normalise vectors to length 1, in the same way as the reference's kernels."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def _chunked(x: Tensor, chunks: Chunks) -> Tensor:
    """Convert [N, H, ...] to [C, H, CHUNK, ...]."""
    slots = to_slots(x, chunks.slot_tokens, chunks.token_slots)
    return slots.unflatten(0, (-1, CHUNK)).transpose(1, 2)
