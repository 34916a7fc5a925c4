"""Policy that says what a script says, in tokens, with the checks of an engine's completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from mrl.data.tokenise import decoder
from mrl.rollout.request import Completion, GenerationRequest
from mrl.samples import Status
from tests.support.samples import make_completion


class ScriptedPolicy:
    """Policy for tests without an engine: `say` gets a context's text and returns the next turn's."""

    def __init__(self, tokenizer: Any, say: Callable[[str], str], *, seconds: float = 0.0) -> None:
        """`seconds`: time of a turn."""
        self._tokenizer, self._say, self._seconds = tokenizer, say, seconds
        self._decode = decoder(tokenizer)
        self.requests: list[GenerationRequest] = []
        self.version = 0

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        """Return the scripted turn, cut at the request's limit."""
        self.requests.append(request)
        await asyncio.sleep(self._seconds)
        text = self._say(self._tokenizer.decode(request.prompt_tokens.tolist()))
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        cut = ids[: request.max_tokens]
        status = Status.FINISHED if len(cut) == len(ids) else Status.TRUNCATED
        (shown,) = self._decode([np.array(cut)])
        logprobs = -np.arange(1, len(cut) + 1) / 8
        return make_completion(
            request, cut, logprobs=logprobs.tolist(), version=self.version, status=status, text=shown
        )
