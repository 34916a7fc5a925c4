"""Responses in the making: what was asked, what came so far, and what is asked next. Pure: imports no engine.

A response may take several requests: where weights are synced, a checkpoint is cut or an engine is to be emptied, its request
comes back PARKED with the tokens so far, and the next one asks an engine to go on after them. Here alone is decided with which
budget and seed, and how the segments become one response and one sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import numpy as np

from mrl.errors import RolloutError
from mrl.rollout.request import (
    MAX_ATTEMPTS,
    GenerationRequest,
    Response,
    Round,
    prompt_digest,
    sample_of,
    seed_of_request,
)
from mrl.routes import one_after_other
from mrl.samples import Prompt, Sample, Status


class Drafts:
    """The requests that have no whole response yet, on the driver's side; an engine keeps nothing of what it gave back."""

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self._asked: dict[str, GenerationRequest | tuple[Round, int, int]] = {}
        """Or a round, and the places of prompt and sample in it: most requests end without another, and need not be made."""
        self._so_far: dict[str, Response] = {}
        self._parked: set[str] = set()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, requests: Iterable[GenerationRequest]) -> None:
        """Takes requests as they were first made, without tokens of their own."""
        self._asked |= {request.request_id: request for request in requests}

    def ask_round(self, requested: Round) -> None:
        """`ask` of all requests of a round."""
        self._asked |= zip(requested.request_ids(), requested.places(), strict=True)

    def _request(self, name: str) -> GenerationRequest:
        asked = self._asked[name]
        return asked if isinstance(asked, GenerationRequest) else asked[0].request(*asked[1:])

    def take(self, responses: Iterable[Response]) -> list[Response]:
        """The whole responses that these end; a parked one stays here. RolloutError for a response to nothing asked."""
        whole = []
        for response in responses:
            name = response.request_id
            if name not in self._asked:
                raise RolloutError(f"a response to request {name} came, which is not among those asked")
            draft = join_responses(self._so_far.pop(name), response) if name in self._so_far else response
            if draft.status is Status.PARKED:
                self._so_far[name] = draft
                self._parked.add(name)
            else:
                del self._asked[name]
                whole.append(draft)
        return whole

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def parked(self) -> list[Response]:
        """What came so far of each request that no engine has now, by prompt and sample."""
        return [self._so_far[name] for name in sorted(self._parked, key=sample_of)]

    def num_context(self, request_id: str) -> int:
        """Tokens that an engine computes before it goes on with a request."""
        so_far = self._so_far.get(request_id)
        return len(self._request(request_id).prompt_tokens) + (len(so_far.tokens) if so_far else 0)

    def so_far(self, request_id: str) -> Response | None:
        """What came so far of a request; None where nothing did, or where its response is whole."""
        return self._so_far.get(request_id)

    def resubmit(self, names: Collection[str] | None = None) -> list[GenerationRequest]:
        """The next request of each parked one, or of these, by prompt and sample; none of them is parked any more."""
        parked = [r for r in self.parked() if names is None or r.request_id in names]
        self._parked -= {r.request_id for r in parked}
        return [next_request(self._request(r.request_id), r, self._run_seed) for r in parked]


def next_request(asked: GenerationRequest, so_far: Response, run_seed: int) -> GenerationRequest:
    """The request that goes on where `so_far` stopped: its own tokens are before it, the rest of the budget is left.

    A request that was parked before its first token is made again as it was: nothing was drawn from its stream.
    RolloutError after MAX_ATTEMPTS requests.
    """
    attempt = so_far.segments[-1].attempt + 1 if so_far.segments else asked.attempt
    if attempt >= MAX_ATTEMPTS:
        raise RolloutError(
            f"request {asked.request_id} was parked {MAX_ATTEMPTS} times after {len(so_far.tokens)} tokens; no seed is left "
            "to go on with: a response must not take that many versions"
        )
    return dataclasses.replace(
        asked,
        own_tokens=so_far.tokens,
        max_tokens=asked.max_tokens - len(so_far.tokens),
        attempt=attempt,
        seed=seed_of_request(run_seed, asked.request_id, attempt),
    )


def join_responses(so_far: Response, more: Response) -> Response:
    """One response of what was parked and what went on after it; it ended as the later one did."""
    moved = tuple(
        dataclasses.replace(s, start=s.start + len(so_far.tokens), end=s.end + len(so_far.tokens))
        for s in more.segments
    )
    return Response(
        more.request_id,
        np.concatenate([so_far.tokens, more.tokens]),
        np.concatenate([so_far.logprobs, more.logprobs]),
        so_far.segments + moved,
        more.status,
        more.text,
        one_after_other(so_far.routes, more.routes),
    )


def whole_sample(prompt: Prompt, sample_index: int, response: Response) -> Sample:
    """The sample of a response, FAILED where a row of its routes is missing, or of its part so far; RolloutError where an engine
    ran other tokens than those before its segment."""
    require_ran(prompt.tokens, response)
    is_whole = response.status is not Status.PARKED
    failed = is_whole and response.routes is not None and response.routes.missing > 0
    return Sample(
        prompt_index=prompt.index,
        sample_index=sample_index,
        prompt_tokens=prompt.tokens,
        response_tokens=response.tokens,
        loss_mask=np.ones(len(response.tokens), dtype=np.bool_),
        rollout_logprobs=response.logprobs,
        policy_versions=response.policy_versions,
        status=Status.FAILED if failed else response.status,
        response_text=response.text,
        domain=prompt.domain,
        tag=prompt.tag,
        segments=response.segments,
        routes=response.routes,
    )


def response_of(sample: Sample) -> Response:
    """The response that `whole_sample` made the sample of."""
    return Response(
        sample.sample_id,
        sample.response_tokens,
        sample.rollout_logprobs,
        sample.segments,
        sample.status,
        sample.response_text,
        sample.routes,
    )


def require_ran(before: np.ndarray, response: Response) -> None:
    """RolloutError where an engine ran other tokens before one of the response's segments than `before` [T] int32 and the
    response's own up to there."""
    for segment in response.segments:
        context = np.concatenate([before, response.tokens[: segment.start]]) if segment.start else before
        if prompt_digest(context) != segment.prompt_digest:
            raise RolloutError(
                f"sample {response.request_id}: engine {segment.engine} ran other tokens before position {segment.start} of the "
                f"response than the {len(context)} of its prompt and earlier segments (request {segment.attempt})"
            )
