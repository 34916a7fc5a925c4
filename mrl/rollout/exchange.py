"""A request as vLLM takes it, and a completion from what vLLM returns, checked against what vLLM itself says of it.

vLLM 0.32. Functions of its objects (`SamplingParams`, `RequestOutput`, the output processor's `RequestState`); knows no engine.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.errors import RolloutError
from mrl.rollout.request import Completion, GenerationRequest, prompt_digest
from mrl.samples import ResponseSegment, Status

_STATUS = {"stop": Status.FINISHED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
_COUNTS = ("token_ids", "prompt_len")
"""By which a detokeniser of vLLM's tells the tokens that were drawn for its request from those before them."""


def engine_prompt(request: GenerationRequest, salt: str = "") -> dict[str, Any]:
    """What the engine computes before it draws a token: the prompt, and the response so far. It finds in the prefix cache
    what requests of the same salt left there."""
    inputs = {"type": "token", "prompt_token_ids": request.engine_prompt().tolist()}
    return inputs | ({"cache_salt": salt} if salt else {})


def sampling_params(request: GenerationRequest, *, stop: Sequence[int], texts: Sequence[str]) -> Any:
    """vLLM's SamplingParams; `stop`, `texts`: what ends every response of the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = [] if request.ignore_stop else list(dict.fromkeys((*stop, *request.stop_token_ids)))
    texts = [] if request.ignore_stop else list(texts)
    return SamplingParams(
        temperature=0.0 if request.greedy else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=None if request.greedy else request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=stop,
        ignore_eos=True,  # the stopping tokens are exactly those above
        stop=texts,
        detokenize=bool(texts),
        logprobs=0,
        routed_experts_prompt_start=request.first_row,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for this request alone; vLLM would copy it deeply, 62 us
    )


def remember_text(state: Any, tokenizer: Any, parameters: Any, request: GenerationRequest) -> None:
    """Gives a request that goes on the text of its own tokens, so that a stop text which begins there ends it.

    vLLM's detokeniser reads them as those of the first request were read, one by one behind the prompt: begun behind half a
    character, it would take all text before it, the prompt's too, for that of the next token.
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


def unfinished(state: Any) -> Any:
    """The output of a request that is about to leave the engine, with its tokens so far (what vLLM's asynchronous engine
    makes of an abort, and its synchronous one throws away)."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None)


def completion(output: Any, *, version: int | None, engine: int, attempt: int) -> Completion:
    """Return what came of one request, with a segment for each version that vLLM names.

    Raises:
        RolloutError: vLLM's log-probs are not those of the tokens, or other weights than `version` generated some of them
            (None: any may have).
    """
    result, drawn = output.outputs[0], np.asarray(output.outputs[0].token_ids, np.int32)
    spans = _spans(output.request_id, result.weight_versions or [], len(drawn), version)
    prompt = np.asarray(output.prompt_token_ids, np.int32)
    segments = (
        ResponseSegment(
            start,
            end,
            own,
            attempt,
            engine,
            prompt_digest(np.concatenate([prompt, drawn[:start]]) if start else prompt),
        )
        for own, start, end in spans
    )
    return Completion(
        output.request_id,
        drawn,
        _logprobs(output.request_id, result.logprobs, drawn),
        tuple(segments),
        _STATUS.get(result.finish_reason, Status.FAILED),
    )


def _logprobs(request_id: str, flat: Any, tokens: np.ndarray) -> np.ndarray:
    """Return [T] float32; logprobs=0: one entry a position, the sampled token's."""
    logprobs = np.asarray([flat.logprobs[i] for i in flat.start_indices], np.float32)
    if len(logprobs) != len(tokens) or any(
        flat.token_ids[i] != t for i, t in zip(flat.start_indices, tokens, strict=True)
    ):
        raise RolloutError(f"request {request_id}: vLLM's log-probs are not those of the sampled tokens")
    return logprobs


def _spans(
    request_id: str, named: Sequence[Any], count: int, version: int | None
) -> list[tuple[int, int, int]]:
    """Return (version, first token, one past the last) of all `count` tokens, in order, by vLLM's own account."""
    spans = [(int(s.version), s.start, s.end) for s in named if s.start < s.end]
    bounds = [0, *(end for _, _, end in spans)]
    follows = [start for _, start, _ in spans] == bounds[:-1] and bounds[-1] == count
    if not follows or (version is not None and any(own != version for own, *_ in spans)):
        raise RolloutError(
            f"request {request_id}: its {count} tokens were to be of version {version}, and vLLM says (version, from, to): "
            f"{spans or 'nothing'}"
        )
    return spans
