"""Functions that run inside an engine's process (`EngineHost.call`), and their reference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.resharding.transfer.session import Session
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import Completion, GenerationRequest
from mrl.samples import Status

SEVERAL: dict[str, Any] = {
    "expert_parallel": True,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_bytes": 64 << 20,
    "max_num_seqs": 8,
    "step_deadline_seconds": 240,
}


def generate(
    engine: RolloutEngine, requests: list[GenerationRequest], seconds: float = 60.0
) -> list[Completion]:
    engine.resume()
    try:
        return engine.generate(requests, deadline=time.monotonic() + seconds)
    except Exception:
        engine.abort([r.request_id for r in requests])
        raise


def whole(requests: list[GenerationRequest], completions: list[Completion]) -> list[Completion]:
    """Return the completions in the requests' order; check that each came once and ended."""
    by_id = {completion.request_id: completion for completion in completions}
    assert sorted(by_id) == sorted(r.request_id for r in requests) and len(by_id) == len(completions)
    assert Status.INTERRUPTED not in {completion.status for completion in completions}
    return [by_id[r.request_id] for r in requests]


def steps(engine: RolloutEngine, requests: list[GenerationRequest], count: int) -> list[Completion]:
    """Submit the requests and return what ends in so many steps."""
    engine.resume()
    engine.submit(requests)
    return [completion for _ in range(count) for completion in engine.step()]


def paused_after(
    engine: RolloutEngine, requests: list[GenerationRequest], count: int
) -> tuple[list[Completion], list[Completion]]:
    """Return (what ended in so many steps and the pause after them, the snapshot of the rest)."""
    ended = steps(engine, requests, count)
    engine.pause()
    return ended + engine.take_ended(), engine.snapshot()


def in_segments(engine: RolloutEngine, requests: list[GenerationRequest], count: int) -> list[Completion]:
    """Return the completions in the requests' order; the engine pauses after every `count` steps."""
    engine.resume()
    engine.submit(requests)
    ended: list[Completion] = []
    while engine.has_work:
        ended += [completion for _ in range(count) for completion in engine.step()]
        engine.pause()
        engine.resume()
    return whole(requests, ended)


def rescored(engine: RolloutEngine, rows: list[list[int]]) -> list[np.ndarray]:
    """Return log-probs [T - 1] of each row's tokens [T] after its first, from one pass over the row."""
    from vllm import SamplingParams

    vllm: Any = engine._engine
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    for number, row in enumerate(rows):
        vllm.add_request(str(number), {"type": "token", "prompt_token_ids": row}, parameters)
    logprobs: dict[int, np.ndarray] = {}
    while len(logprobs) < len(rows):
        for output in vllm.step():
            if output.finished:
                row, entries = rows[int(output.request_id)], output.prompt_logprobs[1:]
                values = [entry[token].logprob for token, entry in zip(row[1:], entries, strict=True)]
                logprobs[int(output.request_id)] = np.array(values, np.float32)
    return [logprobs[number] for number in range(len(rows))]


ROCM_ALONE = ("_k_scale_cpu", "_v_scale_cpu")
"""Plain attributes of vLLM's attention that no CUDA backend reads."""


def lost_asleep(engine: RolloutEngine) -> list[str]:
    """Return names of model tensors that sleep level 2 loses: plain attributes, neither weight nor buffer."""
    vllm: Any = engine._engine
    (names,) = vllm.collective_rpc(_plain_tensors)
    return names


def _plain_tensors(worker: Any) -> list[str]:
    model = worker.model_runner.model
    kept = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    return [
        f"{name}: {path}"
        for name, module in model.named_modules()
        for path, tensor in _tensors_in(module, "", 0)
        if tensor.numel()
        and not path.endswith(ROCM_ALONE)
        and tensor.untyped_storage().data_ptr() not in kept
    ]


def _tensors_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, torch.nn.Module) and depth:
        return  # has its own turn
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors_in(item, f"{path}[{number}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}[{key!r}]", depth + 1)
    elif type(value).__module__.startswith("vllm.") and depth < 3 and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            if name not in ("_parameters", "_buffers", "_modules", "kv_cache"):
                yield from _tensors_in(item, f"{path}.{name}", depth + 1)


def version(engine: RolloutEngine) -> int:
    return engine.policy_version


def pause(engine: RolloutEngine) -> None:
    engine.pause()


def addresses(engine: RolloutEngine) -> list[str]:
    return engine.prepare_sync()


def receive(engine: RolloutEngine, session: Session) -> dict[str, Any]:
    return engine.receive(session)


def release(engine: RolloutEngine) -> None:
    engine.release_sync()


def requests(
    count: int, *, length: int = 8, max_tokens: int = 8, seed: int = 0, **fields: Any
) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerationRequest(
            f"{seed}.{i}",
            rng.integers(2, 131, length).astype(np.int32),
            1000 * seed + i,
            max_tokens,
            **fields,
        )
        for i in range(count)
    ]


def share_of_own_routes(folder: Path, requests: list[GenerationRequest], answers: list[Completion]) -> float:
    """Return the share of experts in responses' rows that transformers' float32 routers also choose."""
    import torch

    from tests.tiny_models import reference_model

    model, shares = reference_model(folder), []
    for request, answer in zip(requests, answers, strict=True):
        tokens = torch.tensor(np.concatenate([request.prompt_tokens, answer.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(tokens, output_router_logits=True).router_logits
        assert answer.routes is not None and answer.routes.missing == 0
        experts = answer.routes.layers(list(range(len(logits))))
        chosen = torch.stack(logits, 1)[:-1].topk(experts.shape[2]).indices.numpy()
        assert experts.shape == chosen.shape
        shares.append((experts[..., None] == chosen[..., None, :]).any(-1).mean())
    return float(np.mean(shares))


def middle_gap(folder: Path, requests: list[GenerationRequest], answers: list[Completion]) -> float:
    """Return the median response's worst gap: a router's near-tie moves single responses far."""
    worst = [worst_gap(folder, [r], [a]) for r, a in zip(requests, answers, strict=True)]
    return sorted(worst)[len(worst) // 2]


def worst_gap(folder: Path, requests: list[GenerationRequest], answers: list[Completion]) -> float:
    """Return the largest log-prob difference from transformers in float32 on the same tokens, over their
    sampling masks."""
    import torch

    from tests.tiny_models import reference_model

    model = reference_model(folder)
    worst = 0.0
    for request, answer in zip(requests, answers, strict=True):
        tokens = torch.tensor(np.concatenate([request.prompt_tokens, answer.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
        scale = 1.0 if request.greedy else request.temperature
        if (masks := answer.sampling_masks) is not None:
            kept = torch.zeros(logits.shape, dtype=torch.bool)
            owners = np.repeat(np.arange(len(masks.counts)), masks.counts)
            kept[torch.from_numpy(owners), torch.from_numpy(masks.tokens.astype(np.int64))] = True
            kept |= torch.from_numpy(masks.counts == 0)[:, None]
            logits = logits.masked_fill(~kept, -torch.inf)
        expected = (
            (logits / scale).log_softmax(-1).gather(1, torch.tensor(answer.tokens).long()[:, None])[:, 0]
        )
        worst = max(worst, float((expected - torch.tensor(answer.logprobs)).abs().max()))
    return worst
