"""Verifier `llm`: a language model gives a verdict on each response.

Only a reply in the requested form is a verdict. Anything else (a server that is down, a truncated reply,
other words) is a failure of the verifier, and the sample has no reward.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mrl.errors import RewardError
from mrl.rewards.contract import RewardRequest, rejected, scored
from mrl.rewards.judges.attacks import GUESS
from mrl.rewards.judges.endpoint import Endpoint
from mrl.rewards.judges.judge_cache import JudgeCache, check_budget, json_digest
from mrl.rewards.judges.judge_rules import LlmRules
from mrl.rewards.judges.question import (
    Question,
    build_question,
    prompt_text,
    read_choice,
    read_line,
    template_of,
)
from mrl.rewards.judges.untrusted import ControlStrings, rejection_reason
from mrl.rewards.reward_part import RewardPart, ServerSection
from mrl.samples import Verdict

_ASK_AGAIN_TEMPERATURE = 0.7
_TOP_LOGPROBS = 20
_OF_THE_VERDICT = ("reference", "choices", "verdict", "constrained", "reply_tokens", "body")
"""Rules that a verdict depends on, besides the template and the control tokens."""
MAX_REPLIES = 2
"""Replies requested until one has a verdict: first at temperature 0, then at 0.7 with another seed."""


class LlmVerifier:
    """Verifier that calls a server's chat completions."""

    name = "llm"
    waits = True

    def __init__(self, part: RewardPart, rules: LlmRules, folder: Path | None) -> None:
        self._part, self._rules = part, rules
        self._questions = QuestionBuilder(rules, part.server)
        self.version = self._questions.judge(Endpoint.identity(part))
        self._ledger = JudgeCache(folder, self.version)
        self._endpoint = Endpoint.of(part)

    async def score(self, request: RewardRequest) -> Verdict:
        reference = str(request.ground_truth) if self._rules.reference else ""
        if fault := rejection_reason(request.visible, prompt_text(request), reference):
            return rejected(fault, min_reward=self._part.min_reward)
        question = self._questions.about(request, self._nonce(request.sample_id))
        value = await self._value(question)
        return scored(value, score=value, control_strings=float(question.control_strings))

    async def _value(self, question: Question) -> float:
        key, ledger = json_digest(question.text), self._ledger
        if (cached := ledger.find(key)) is not None:
            return cached
        fault: RewardError | None = None
        for number in range(MAX_REPLIES):
            check_budget(self._part.server, ledger)
            reply = await self._endpoint.post("/chat/completions", self._body(question, number))
            tokens = _tokens(reply)
            try:
                value = self._read(reply, question)
            except RewardError as error:
                ledger.record(tokens)
                fault = error
                continue
            ledger.record(tokens, key, value)
            return value
        raise RewardError(f"{fault} ({MAX_REPLIES} replies)") from fault

    def _body(self, question: Question, number: int) -> dict[str, Any]:
        rules = self._rules
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question.text}],
            "temperature": _ASK_AGAIN_TEMPERATURE if number else 0.0,
            "seed": (int(question.nonce, 16) + number) % 2**31,
            "max_tokens": rules.reply_tokens,
        }
        if self._part.server.model:
            body["model"] = self._part.server.model
        if rules.verdict == "choice":
            body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        if rules.constrained:
            body["structured_outputs"] = {"choice": list(rules.choices)}
        return body | rules.body

    def _read(self, reply: dict[str, Any], question: Question) -> float:
        replies = reply.get("choices")
        if not isinstance(replies, list) or not replies or not isinstance(replies[0], dict):
            raise RewardError(f"the server's response contains no reply: {str(reply)[:80]!r}")
        if self._rules.verdict == "choice":
            return read_choice(replies[0], self._rules.choices)
        return read_line(replies[0], self._rules.choices, question.nonce)

    def _nonce(self, sample_id: str) -> str:
        """Return 64 bits, as hex, that only this run can compute."""
        return hashlib.sha256(f"{self._ledger.secret}\0{sample_id}".encode()).hexdigest()[:16]


class QuestionBuilder:
    """Builder of the questions to a judge."""

    def __init__(self, rules: LlmRules, server: ServerSection) -> None:
        """Read the template and the judge's control tokens. Raises ConfigError if it cannot."""
        self._rules, self._model = rules, server.model
        self.template = template_of(rules)
        self._controls = ControlStrings.of_folder(server.tokenizer)

    def judge(self, who: Any) -> str:
        """Return the digest of all that decides a verdict; `who` is the server's identity."""
        rules = {name: getattr(self._rules, name) for name in _OF_THE_VERDICT} | {"model": self._model}
        return json_digest("llm", who, rules, self.template, self._controls.pattern)[:12]

    def about(self, request: RewardRequest, nonce: str) -> Question:
        """Build the question about a response."""
        return build_question(
            self.template,
            self._rules,
            self._controls,
            question=prompt_text(request),
            reference=str(request.ground_truth) if self._rules.reference else "",
            response=request.visible,
            nonce=nonce,
        )


def question_preview(rules: LlmRules, server: ServerSection, request: RewardRequest) -> str:
    """Return the text of the question about a response, with a dummy nonce."""
    return QuestionBuilder(rules, server).about(request, GUESS).text


def _tokens(reply: dict[str, Any]) -> int:
    usage = reply.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else 0
    return total if isinstance(total, int) else 0
