"""A process reward model behind vLLM's pooling server (POST {url}/pooling, task token_classify): every step of a response has a score, the
log-odds that it is right, and the reward is made of their probabilities.

The response is cut at the separator that the model was trained with (mrl/reasoning_steps.py), and a step's score is that of its last token.
Which reduction is usual differs: the least (Math-Shepherd, arXiv 2312.08935), the product ("Let's Verify Step by Step", 2305.20050), the last.
With token_values each probability also stands at the policy's token that ends the step, which the estimators of process rewards take
(DeepSeekMath, 2402.03300, 4.1.3).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from mrl.errors import RewardError
from mrl.reasoning_steps import split_steps, step_ends
from mrl.rewards.contract import RewardRequest, checked_value, scored
from mrl.rewards.judges.reward_model_judge import RewardModelVerifier
from mrl.rewards.thoughts import ThoughtMarks
from mrl.samples import Verdict

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "mean": statistics.fmean,
    "last": lambda probabilities: probabilities[-1],
}


class ProcessRewardVerifier(RewardModelVerifier):
    """Asks a server about every step."""

    async def score(self, request: RewardRequest) -> Verdict:
        steps = split_steps(request.response, self._conversation.step_separator)
        defused = [self._conversation.defuse(step) for step in steps]
        ids, ends = self._ids(request, [text for text, _ in defused])
        found = await self._ask(
            "/pooling", request, ids, lambda reply: _scores_at(reply, ends, len(ids)), task="token_classify"
        )
        probabilities = [1 / (1 + math.exp(-score)) if score > -700 else 0.0 for score in found]
        reward = REDUCTIONS[self._rules.step_reduction or "min"](probabilities)
        verdict = scored(
            reward,
            steps=float(len(steps)),
            lowest_step=min(probabilities),
            control_strings=float(sum(count for _, count in defused)),
        )
        if not self._rules.token_values or request.is_trial:
            return verdict
        return dataclasses.replace(verdict, token_values=self._token_values(request, steps, probabilities))

    def _ids(self, request: RewardRequest, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """The tokens that the model reads, and of each step the place of its last one."""
        if self._conversation.defuse("".join(steps))[1]:
            raise RewardError("the response has a control string across two steps")
        before, lead, _ = self._conversation.around(request)
        own, counts = step_ends(self._conversation.tokenizer, [lead + steps[0], *steps[1:]])
        return [*before, *own], [len(before) + count - 1 for count in counts]

    def _token_values(
        self, request: RewardRequest, steps: Sequence[str], probabilities: Sequence[float]
    ) -> np.ndarray:
        """[T] of the policy's tokens: the probability of each step at the token that ends it, NaN elsewhere; of steps that end in one
        token the last."""
        tokens = request.response_tokens
        if tokens is None or not len(tokens):
            raise RewardError("token_values: the response has no tokens")
        parts = _parts(self._conversation.tokenizer, tokens)
        if not "".join(parts).startswith(request.response):
            raise RewardError(
                "token_values: the response's tokens are another text by the reward model's tokenizer, which has to be the policy's"
            )
        lengths = list(itertools.accumulate(map(len, parts)))
        ends = itertools.accumulate(len(step) for step in steps[:-1])
        places = [min(bisect.bisect_left(lengths, end), len(tokens) - 1) for end in ends]
        values = np.full(len(tokens), np.nan, np.float32)
        values[[*places, len(tokens) - 1]] = probabilities
        return values


def _parts(tokenizer: Any, tokens: np.ndarray) -> list[str]:
    """What each of [T] tokens adds to the text; a character that lies across tokens is the last one's."""
    stream = DecodeStream(skip_special_tokens=True)
    marks, ids = ThoughtMarks(tokenizer), tokens.tolist()
    shown = marks.overrides(ids) if marks else [None] * len(ids)
    return [
        (stream.step(tokenizer.backend_tokenizer, token) or "") if mark is None else mark
        for token, mark in zip(ids, shown, strict=True)
    ]


def _scores_at(reply: dict[str, Any], places: Sequence[int], count: int) -> tuple[float, ...]:
    """The numbers at the places among those of `count` tokens."""
    try:
        (row,) = reply["data"]
        values = [value for (value,) in row["data"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            f"the process reward model's answer is no list of one number a token: {str(reply)[:120]!r}; its server is started with "
            """--pooler-config '{"task": "token_classify"}'"""
        ) from error
    if len(values) != count:
        raise RewardError(f"the process reward model's answer has {len(values)} numbers for {count} tokens")
    return tuple(checked_value(values[place], verifier="reward_model") for place in places)
