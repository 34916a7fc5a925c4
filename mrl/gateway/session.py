"""Access of one trajectory's program to the policy, whatever API its requests use.

The run decides sampling; a request may only shorten its turn. Turns of a program are generated one after the
other, so that each has its own seed; a repeated request gets the turn that it asked for first.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mrl.agents.episode import EndedBy, Limits
from mrl.agents.tool_calls import ToolCall
from mrl.errors import ConfigError, MrlError
from mrl.gateway.conversations import Conversations, PolicyTurn
from mrl.gateway.histories import ChatMessage, Histories, History
from mrl.gateway.templates import Templates, identity_of
from mrl.rewards.thoughts import as_thought
from mrl.rollout.engine_pool import Policy
from mrl.rollout.request import GenerationRequest, require_same_context
from mrl.rollout.seeds import MAX_ATTEMPTS, seed_of_request
from mrl.samples import Status

log = logging.getLogger(__name__)

_PASSING = (EndedBy.CONTEXT_LIMIT, EndedBy.TOKEN_LIMIT)
"""Limits that a program has dealt with if a later turn is whole."""


_MOST_TOOLS = 64
"""Most lists of tools to remember."""


class RefusedRequest(MrlError, RuntimeError):
    """A request that gets no turn."""

    def __init__(self, status: int, kind: str, reason: str, field: str = "") -> None:
        """`kind`: type of the error in OpenAI's API; `field`: name of the request's field at fault."""
        super().__init__(reason)
        self.status, self.kind, self.field = status, kind, field


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Turn of the policy, for an answer."""

    message: ChatMessage
    thought: str
    turn: PolicyTurn
    num_prompt_tokens: int
    is_cut: bool
    """The turn reached its token limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a request's turn belongs."""

    parent: PolicyTurn | None
    """Turn that the request continues."""
    before: np.ndarray
    """[n] int32: tokens after the parent's; without a parent, the whole prompt."""
    context: np.ndarray
    """[T] int32: all tokens before the turn."""
    observation: str = ""
    """What `before` says."""


class ModelSession:
    """One attempt of a program to produce a trajectory. All methods belong to one event loop."""

    def __init__(
        self,
        policy: Policy,
        templates: Templates,
        limits: Limits,
        request: GenerationRequest,
        *,
        run_seed: int,
        attempt: int = 0,
        on_wait: Callable[[bool], None] = lambda waits: None,
    ) -> None:
        """Create the session.

        Args:
            request: The sample's request, for its id and sampling.
            attempt: Number of the first of the sample's requests to engines that is still free.
            on_wait: Called with True when the program starts to wait for the policy, and with False.
        """
        self._policy, self._limits, self._request = policy, limits, request
        self.templates = templates
        self._run_seed, self.attempt, self._on_wait = run_seed, attempt, on_wait
        self.conversations = Conversations()
        self._lock = asyncio.Lock()
        self._tools: dict[tuple[object, bytes], str] = {}
        """Identities of tools, by who read them and their JSON."""
        self.histories = Histories()
        self.stored: dict[str, list[bytes]] = {}
        """JSON of the items up to each response that later requests may name, by its id."""
        self._repeatable: dict[str, asyncio.Task[Reply]] = {}
        """Latest answer to each request."""
        self._open: set[asyncio.Task[Reply]] = set()
        self.ended_by: EndedBy | None = None
        """Limit of the policy that a request met, or the failure of ours that one met."""
        self.reason = ""
        self.failure: Exception | None = None
        """Error that ends the run."""
        self.failed = asyncio.Event()
        self._is_closed = False

    async def answer(
        self,
        history: History,
        tools: str = "",
        *,
        max_tokens: int | None = None,
        name: str = "",
        is_repeated: bool = False,
    ) -> Reply:
        """Return the policy's next turn of a conversation.

        Args:
            tools: Identity of the request's tools (`identity_of`).
            name: Identity of the request.
            is_repeated: The client has sent it before: it gets the turn of the first one, if there is any.

        Raises:
            RefusedRequest: There is none.
        """
        task = self._repeatable.get(name) if is_repeated else None
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.ensure_future(self._answer(history, tools, max_tokens))
            self._repeatable[name] = task
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        return await asyncio.shield(task)  # a client that goes does not end its turn

    @property
    def name(self) -> str:
        """Id of the sample."""
        return self._request.request_id

    def token_text(self, token: int) -> str:
        """Return the text of one token."""
        return self.templates.tokenizer.decode([token])

    def identity_of_tools(self, read: Callable[[Any], Mapping[str, Any]], tools: bytes) -> str:
        """Return the identity of a request's tools, their JSON read one by one; the same object each time."""
        known = self._tools.get((read, tools))
        if known is None:
            if len(self._tools) >= _MOST_TOOLS:
                self._tools.clear()
            known = identity_of([read(tool) for tool in msgspec.json.decode(tools) or ()])
            self._tools[read, tools] = known
        return known

    def count_tokens(self, history: History, tools: str = "") -> int:
        """Return the number of tokens before the turn that a request would get."""
        return len(self._place(history, tools).context)

    async def close(self) -> None:
        """Refuse further requests, and give up the turn that is being generated."""
        self._is_closed = True
        for task in self._open:
            task.cancel()
        async with self._lock:
            pass

    async def _answer(self, history: History, tools: str, max_tokens: int | None) -> Reply:
        if self._lock.locked():  # what is refused is refused at once
            self._budget(self._place(history, tools).context)
        async with self._lock:
            self._require_open()
            place = self._place(history, tools)
            limit = self._budget(place.context)
            budget = min(limit, max_tokens or limit)
            try:
                reply = await self._generate(history, tools, place, budget)
            except RefusedRequest:
                raise
            except Exception as error:
                self.failure = error
                self.failed.set()
                raise RefusedRequest(503, "server_error", "the run has failed") from error
            if reply.is_cut and budget == limit:
                self._note(EndedBy.TOKEN_LIMIT, f"a turn reached its limit of {limit} tokens")
            elif self.ended_by in _PASSING:
                self.ended_by, self.reason = None, ""  # the program has found a way
            return reply

    def _require_open(self) -> None:
        if self.failure is not None:
            raise RefusedRequest(503, "server_error", "the run has failed")
        if self._is_closed:
            raise RefusedRequest(403, "permission_denied", "the trajectory has ended")
        if len(self.conversations.turns) >= self._limits.max_turns or self.attempt >= MAX_ATTEMPTS - 1:
            reason = f"the trajectory has had its {self._limits.max_turns} turns (agent.max_turns)"
            self._note(EndedBy.TURN_LIMIT, reason)
            raise RefusedRequest(403, "permission_denied", reason)

    def _budget(self, context: np.ndarray) -> int:
        """Return the most tokens that a turn after a context may have."""
        longest = self._limits.max_context
        budget = min(self._limits.max_turn_tokens, longest - len(context))
        if budget < 1:
            # clients look for these words
            reason = f"maximum context length is {longest} tokens, but the request has {len(context)}"
            self._note(EndedBy.CONTEXT_LIMIT, reason)
            raise RefusedRequest(400, "context_length_exceeded", reason)
        return budget

    def _place(self, history: History, tools: str) -> _Place:
        """Return the place of a request's turn. Raise RefusedRequest if the request has none."""
        try:
            self.templates.check_tools(tools)
        except ConfigError as error:
            raise RefusedRequest(400, "invalid_request_error", str(error), "tools") from error
        try:
            parent, new = self.conversations.find(history)
            if parent is not None:
                with contextlib.suppress(ConfigError):  # else a new conversation
                    before = self.templates.after(parent, new, tools)
                    observation = "\n".join(message.text for message in new)
                    return _Place(parent, before, np.concatenate([parent.context(), before]), observation)
            before = self.templates.opening(history.messages, tools)
        except (ConfigError, UnicodeError) as error:
            raise RefusedRequest(400, "invalid_request_error", str(error), "messages") from error
        except Exception as error:
            log.exception("the gateway could not render a request of sample %s", self.name)
            self._note(EndedBy.ENGINE_LOST, f"the gateway failed: {error!r:.200}")
            raise RefusedRequest(503, "server_error", "the gateway failed") from error
        opening = "\n".join(f"{message.role}: {message.text}" for message in history.messages)
        return _Place(None, before, before, opening)

    async def _generate(self, history: History, tools: str, place: _Place, budget: int) -> Reply:
        context = place.context
        request = dataclasses.replace(
            self._request,
            prompt_tokens=context,
            max_tokens=budget,
            attempt=self.attempt,
            seed=seed_of_request(self._run_seed, self._request.request_id, self.attempt),
            urgent=True,
        )
        self._on_wait(True)
        try:
            completion = await self._policy.generate(request)
        finally:
            self._on_wait(False)
        if self._is_closed:
            raise RefusedRequest(403, "permission_denied", "the trajectory has ended")
        if completion.status in (Status.FAILED, Status.ABORTED) or not completion.segments:
            reason = f"generation {completion.status.value}"
            self._note(EndedBy.ENGINE_LOST, reason)
            raise RefusedRequest(503, "server_error", reason)
        require_same_context(context, completion)
        self.attempt = completion.segments[-1].attempt + 1
        text = as_thought(completion.text) if self.templates.opens_thought(context) else completion.text
        message, thought = self.templates.reply(text, tools)
        message = dataclasses.replace(message, calls=tuple(self._with_ids(message.calls)))
        turn = self.conversations.add(
            place.parent,
            place.before,
            completion,
            history=history,
            reply=message,
            text=text,
            observation=place.observation,
        )
        return Reply(message, thought, turn, len(context), completion.status is Status.TRUNCATED)

    def _with_ids(self, calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
        """Give calls ids where the policy wrote none."""
        for number, call in enumerate(calls):
            call_id = f"call_{len(self.conversations.turns)}_{number}"
            yield call if call.id else dataclasses.replace(call, id=call_id)

    def _note(self, ended_by: EndedBy, reason: str) -> None:
        """Keep a failure of ours, else the last turn, else the newest limit."""
        if self.ended_by in (None, *_PASSING) or ended_by.is_infrastructure_failure:
            self.ended_by, self.reason = ended_by, reason
