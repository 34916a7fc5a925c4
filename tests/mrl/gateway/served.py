"""A gateway in a thread, with a scripted policy, by the clients that programs have."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import numpy as np
import openai

from mrl.agents.environment import Model
from mrl.agents.episode import Limits
from mrl.gateway.server import Gateway
from mrl.gateway.session import ModelSession
from mrl.gateway.templates import Templates
from mrl.rollout.request import GenerationRequest, prompt_digest
from mrl.samples import Prompt, Sample, Status, Transcript
from tests.support import chat_tokenizers
from tests.support.family_templates import Form
from tests.support.family_templates import tokenizer as family_tokenizer
from tests.support.scripted_policy import ScriptedPolicy

PROMPT = Prompt(3, np.array([1], np.int32), "?", None)
LIMITS = Limits(max_turns=8, max_context=4000, max_tokens=4000, max_turn_tokens=200)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


class Served:
    """A gateway in a thread, with one open session."""

    def __init__(self, address: Model, session: ModelSession, policy: ScriptedPolicy) -> None:
        self.session, self.policy = session, policy
        self.openai = openai.OpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=address.url, api_key=address.key, max_retries=0)
        self.address = address

    def say(self, *messages: dict[str, Any], **options: Any) -> Any:
        """Return the message of OpenAI's first choice."""
        answer = self.openai.chat.completions.create(model="m", messages=list(messages), **options)
        return answer.choices[0].message

    def sample(self) -> Sample:
        return self.session.conversations.sample(PROMPT, 0, Status.FINISHED, Transcript(()))


Serve = Callable[..., contextlib.AbstractContextManager[Served]]


@contextlib.contextmanager
def gateway_thread() -> Iterator[Serve]:
    """Return a function that serves a script: context's text -> turn."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    gateway: list[Gateway] = []

    def do(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def make() -> None:
        gateway.append(Gateway())

    @contextlib.contextmanager
    def served(
        say: Callable[[str], str],
        *,
        family: str | Form = "qwen",
        limits: Limits = LIMITS,
        seconds: float = 0.0,
        **options: Any,
    ) -> Iterator[Served]:
        tokenizer = family_tokenizer(family) if isinstance(family, Form) else chat_tokenizers.ALL[family]()
        policy = ScriptedPolicy(tokenizer, say, seconds=seconds)
        request = GenerationRequest("3.0", PROMPT.tokens, 0, 1, temperature=0.8)
        stack = contextlib.AsyncExitStack()

        async def open_session() -> tuple[ModelSession, Model]:
            session = ModelSession(policy, Templates(tokenizer, **options), limits, request, run_seed=1)
            return session, await stack.enter_async_context(gateway[0].opened(session))

        session, address = do(open_session())
        try:
            yield Served(address, session, policy)
        finally:
            do(stack.aclose())

    do(make())
    yield served

    async def end() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    do(end())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def numbered() -> Callable[[str], str]:
    """Return a script that says "turn 0", "turn 1", ..."""
    count = iter(range(100))
    return lambda context: f"turn {next(count)}"


def check_tokens(sample: Sample, policy: ScriptedPolicy) -> None:
    """Each turn that the policy took is trained once, after exactly the tokens that the engine ran."""
    contexts = {prompt_digest(request.prompt_tokens) for request in policy.requests}
    seen = []
    for sequence in sample.sequences:
        whole = np.concatenate([sequence.prompt_tokens, sequence.response_tokens])
        for segment in sequence.segments:
            before = whole[: len(sequence.prompt_tokens) + segment.start]
            assert prompt_digest(before) == segment.prompt_digest in contexts
            assert sequence.loss_mask[segment.start : segment.end].all()
            seen.append(segment.attempt)
        assert sequence.loss_mask.sum() == sum(s.end - s.start for s in sequence.segments)
    assert sorted(seen) == list(range(len(policy.requests)))
