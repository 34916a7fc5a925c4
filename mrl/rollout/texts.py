"""The text of each response, made in its engine's process, so that the driver turns no token into text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from mrl.rollout.request import GenerationRequest, Response
from mrl.samples import Status

Decode = Callable[[list[np.ndarray]], list[str]]
"""Token arrays [T] to texts, many at a time (mrl/data/tokenise.py, `decoder`)."""


class Texts:
    """Of one engine's responses. A response that took several requests is one text: characters may lie across their tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: dict[str, np.ndarray] = {}
        """The tokens of earlier requests, of each response that goes on here."""

    def expect(self, requests: Iterable[GenerationRequest]) -> None:
        """Notes what the responses to these requests go on from."""
        self._before |= {r.request_id: r.own_tokens for r in requests if len(r.own_tokens)}

    def told(self, responses: Iterable[Response]) -> list[Response]:
        """The same responses, each that ended with the text of all its tokens; a parked one has none yet."""
        responses = list(responses)
        tokens = [self._all_tokens(response) for response in responses]
        ended = [number for number, response in enumerate(responses) if response.status is not Status.PARKED]
        for number, text in zip(ended, self._decode([tokens[number] for number in ended]), strict=True):
            responses[number] = dataclasses.replace(responses[number], text=text)
        return responses

    def _all_tokens(self, response: Response) -> np.ndarray:
        before = self._before.pop(response.request_id, None)
        return response.tokens if before is None else np.concatenate([before, response.tokens])
