"""Conversion of requests to vLLM's inputs and of vLLM's outputs to checked completions.

vLLM 0.32: `SamplingParams`, `RequestOutput` and the output processor's `RequestState`. Knows no engine.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.errors import RolloutError
from mrl.rollout.request import Completion, GenerationRequest, prompt_digest
from mrl.samples import ResponseSegment, Status
from mrl.sampling_masks import SamplingMasks

_STATUS = {"stop": Status.FINISHED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_COUNTS = ("token_ids", "prompt_len")
"""Fields by which vLLM's detokeniser separates a request's generated tokens from its prompt."""


def engine_prompt(request: GenerationRequest, salt: str = "") -> dict[str, Any]:
    """Return vLLM's prompt: the prompt and the response so far. Requests share cache only within a salt."""
    inputs = {"type": "token", "prompt_token_ids": request.engine_prompt().tolist()}
    return inputs | ({"cache_salt": salt} if salt else {})


def sampling_params(
    request: GenerationRequest, *, stop: Sequence[int], texts: Sequence[str], masked_tokens: int = 0
) -> Any:
    """Return vLLM's SamplingParams; `stop` (tokens) and `texts` end every response of the engine.

    `masked_tokens`: size of the vocabulary, if the engine reports sampling masks itself: it then needs a
    temperature and a top_k.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = [] if request.ignore_stop else list(dict.fromkeys((*stop, *request.stop_token_ids)))
    texts = [] if request.ignore_stop else list(texts)
    return SamplingParams(
        temperature=(1.0 if masked_tokens else 0.0) if request.greedy else request.temperature,
        top_p=request.top_p,
        top_k=1 if request.greedy and masked_tokens else request.top_k or masked_tokens,
        min_p=request.min_p,
        seed=None if request.greedy else request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=stop,
        ignore_eos=True,  # only the stop tokens above end a response
        stop=texts,
        detokenize=bool(texts),
        logprobs=0,
        routed_experts_prompt_start=request.first_row,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # used by this request only; vLLM's deep copy takes 62 us
    )


def restore_detokenizer(state: Any, tokenizer: Any, parameters: Any, request: GenerationRequest) -> None:
    """Detokenise the own tokens of a continued request, so that a stop text that begins in them ends it.

    vLLM's detokeniser reads them one by one after the prompt, as it did in the first request. If it started
    after half a character, it would return all text before it, even the prompt, as the next token's text.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    first: Any = types.SimpleNamespace(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_tokens.tolist(),
        prompt_embeds=None,
        sampling_params=parameters,
    )
    reader: Any = IncrementalDetokenizer.from_new_request(tokenizer, first)
    for token in request.own_tokens.tolist():
        reader.token_ids.append(token)
        reader.output_text += reader.decode_next(token)
    counts = {name: value for name, value in vars(state.detokenizer).items() if name in _COUNTS}
    vars(reader).update(counts)
    state.detokenizer = reader


def partial_output(state: Any) -> Any:
    """Return the output of a request that is about to leave the engine, with its tokens so far. vLLM's
    asynchronous engine returns it for an abort; the synchronous one drops it."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None)


def completion(output: Any, *, version: int | None, engine: int, attempt: int) -> Completion:
    """Return the completion of one request, with one segment per weight version that vLLM reports.

    Raises:
        RolloutError: The log-probs are not the tokens', or `version` (None: any) did not draw them all.
    """
    result, drawn = output.outputs[0], np.asarray(output.outputs[0].token_ids, np.int32)
    spans = _spans(output.request_id, result.weight_versions or [], len(drawn), version)
    prompt = np.asarray(output.prompt_token_ids, np.int32)
    segments = (
        ResponseSegment(
            start,
            end,
            segment_version,
            attempt,
            engine,
            prompt_digest(np.concatenate([prompt, drawn[:start]]) if start else prompt),
        )
        for segment_version, start, end in spans
    )
    return Completion(
        output.request_id,
        drawn,
        _logprobs(output.request_id, result.logprobs, drawn),
        tuple(segments),
        _STATUS.get(result.finish_reason, Status.FAILED),
        sampling_masks=_masks(output.request_id, result.sampling_mask, drawn),
    )


def _masks(request_id: str, reported: Any, drawn: np.ndarray) -> SamplingMasks | None:
    """Return the masks of all drawn tokens; None if nothing was cut off."""
    if reported is None or not len(drawn):
        return None
    masks = SamplingMasks.of(reported.token_ids)
    if len(masks.counts) != len(drawn):
        raise RolloutError(
            f"request {request_id}: vLLM reports {len(masks.counts)} sampling masks for {len(drawn)} tokens"
        )
    if (outside := masks.first_outside(drawn)) is not None:
        raise RolloutError(
            f"request {request_id}: vLLM drew token {outside} of the response from outside its sampling mask"
        )
    return masks


def _logprobs(request_id: str, flat: Any, tokens: np.ndarray) -> np.ndarray:
    """Return [T] float32: the sampled token's log-prob per position (logprobs=0)."""
    logprobs = np.asarray([flat.logprobs[i] for i in flat.start_indices], np.float32)
    if len(logprobs) != len(tokens) or any(
        flat.token_ids[i] != t for i, t in zip(flat.start_indices, tokens, strict=True)
    ):
        raise RolloutError(f"request {request_id}: vLLM's log-probs are not those of the sampled tokens")
    return logprobs


def _spans(
    request_id: str, named: Sequence[Any], count: int, version: int | None
) -> list[tuple[int, int, int]]:
    """Return (version, first token, one past the last) of all `count` tokens, as vLLM reports them."""
    spans = [(int(s.version), s.start, s.end) for s in named if s.start < s.end]
    bounds = [0, *(end for _, _, end in spans)]
    follows = [start for _, start, _ in spans] == bounds[:-1] and bounds[-1] == count
    if not follows or (version is not None and any(span_version != version for span_version, *_ in spans)):
        raise RolloutError(
            f"request {request_id}: its {count} tokens must be of version {version}, but vLLM reports "
            f"(version, from, to): {spans or 'nothing'}"
        )
    return spans
