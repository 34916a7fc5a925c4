"""Requests that stay in vLLM over a weight sync, with the cache that the weights before it computed (stream.in_flight = keep).

The driver has them back as parked, like any others, and asks for them again; only then, and only on the same tokens, they go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.rollout.request import GenerationRequest


class Kept:
    """Those of one engine, by their own ids. Pure."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, np.ndarray, int]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def keep(self, request_id: str, name: str, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        """`name`: vLLM's; `prompt`, `drawn`: what vLLM was given and what it made of it so far."""
        context = np.concatenate([np.asarray(prompt, np.int32), np.asarray(drawn, np.int32)])
        self._of[request_id] = name, context, len(drawn)

    def again(self, request: GenerationRequest) -> tuple[str, int] | None:
        """(vLLM's name, tokens that it has drawn before) of what goes on as this request and is kept no more; None without any."""
        if request.request_id not in self._of:
            return None
        name, context, num_drawn = self._of[request.request_id]
        if not np.array_equal(context, request.engine_prompt()):
            return None
        del self._of[request.request_id]
        return name, num_drawn

    def drop(self) -> list[str]:
        """vLLM's names of all that nobody asked for; forgets them."""
        names = [name for name, *_ in self._of.values()]
        self._of.clear()
        return names
