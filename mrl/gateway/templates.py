"""Messages of programs as tokens, by the model's chat template, and the policy's text as a message."""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jsonschema
import numpy as np

from mrl.agents.render import Observation, TurnRenderer
from mrl.agents.tool_calls import Format, ToolCall, parse_tool_calls, tools_prompt, without_calls
from mrl.errors import ConfigError
from mrl.gateway.conversations import PolicyTurn
from mrl.gateway.histories import ChatMessage
from mrl.rewards.thoughts import CLOSING, OPENING
from mrl.rewards.visible import visible_text

log = logging.getLogger(__name__)

_KEPT = 64
"""Renderers to keep; each distinct list of tools has one."""


class Templates:
    """Renderers of a model's chat template, by the tools that a request has."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_calls: Format = "hermes",
        show_tools: Literal["template", "system", "none"] = "template",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check that there is a template.

        If it changes earlier turns before a user's message (most drop their thoughts), a warning is logged:
        such a message then starts a new conversation, as the template shows it.

        Args:
            tool_calls: Form of calls in the policy's text.
            show_tools: Who shows a request's tools to the policy: the template, a system message or nobody.

        Raises:
            ConfigError: The template is missing, or refuses a question and an answer.
        """
        self.tokenizer, self._show = tokenizer, show_tools
        self._format: Format = tool_calls
        self._kwargs = chat_template_kwargs
        self._renderers: collections.OrderedDict[str, TurnRenderer] = collections.OrderedDict()
        TurnRenderer(tokenizer, roles=(), chat_template_kwargs=chat_template_kwargs)
        try:
            TurnRenderer(tokenizer, roles=("user",), chat_template_kwargs=chat_template_kwargs)
        except ConfigError as error:
            log.warning("each message of a user starts a new conversation of its program: %s", error)

    def check_tools(self, tools: str) -> None:
        """Raise ConfigError if a request's tools are no schemas, or the template does not show them."""
        self._renderer(tools)

    def opening(self, messages: Sequence[ChatMessage], tools: str) -> np.ndarray:
        """Return the tokens of a conversation's messages up to the policy's turn: [n] int32.

        Raises:
            ConfigError: The template refuses them.
        """
        renderer, shown = self._renderer(tools), [_as_template(message) for message in messages]
        if any(message.calls for message in messages):  # their arguments are the template's text
            return renderer.whole(shown)
        try:
            return renderer.opening(shown)
        except ConfigError:
            return renderer.whole(shown)

    def after(self, turn: PolicyTurn, messages: Sequence[ChatMessage], tools: str) -> np.ndarray:
        """Return the tokens from a turn's last one to the policy's next turn: [n] int32. Raise ConfigError if
        the template has no such continuation."""
        observations = [
            Observation(message.text, message.role, message.name, message.call_id)
            for message in messages
            if message.role != "assistant"
        ]
        last = turn.completion.tokens
        return self._renderer(tools).after(int(last[-1]) if len(last) else None, observations)

    def opens_thought(self, tokens: np.ndarray) -> bool:
        """Return True if the [n] tokens before a turn end in a thought that they opened."""
        return self._renderer("").opens_thought(tokens)

    def reply(self, text: str, tools: str) -> tuple[ChatMessage, str]:
        """Return the policy's message, and its thoughts.

        A turn with a call that cannot be read is plain text: its program sees what the policy wrote."""
        visible, thought = visible_text(text), ""
        if CLOSING in text:
            thought = text.rpartition(CLOSING)[0].removeprefix(OPENING).strip()
        calls = parse_tool_calls(text, self._format, _schemas(tools)) if tools else []
        read = tuple(call for call in calls if isinstance(call, ToolCall))
        if not read or len(read) < len(calls):
            return ChatMessage("assistant", visible.strip()), thought
        return ChatMessage("assistant", without_calls(visible, self._format), read), thought

    def _renderer(self, tools: str) -> TurnRenderer:
        if tools not in self._renderers:
            schemas = json.loads(tools) if tools else []
            _check_schemas(schemas)
            renderer = TurnRenderer(
                self.tokenizer,
                tools=schemas if self._show == "template" else None,
                system=tools_prompt(schemas, self._format) if self._show == "system" else None,
                roles=(),
                chat_template_kwargs=self._kwargs,
            )
            if hidden := renderer.hidden_tools():
                raise ConfigError(
                    f"the chat template does not show tools ({', '.join(hidden)}); set "
                    "agent.show_tools=system, or =none if prompts describe them"
                )
            self._renderers[tools] = renderer
            if len(self._renderers) > _KEPT:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(tools)
        return self._renderers[tools]


def identity_of(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a request's tools as JSON; empty without any."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""


def _check_schemas(tools: Sequence[Mapping[str, Any]]) -> None:
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(
                f"the parameters of {name} are no JSON schema: {error.message[:200]}"
            ) from error


def _schemas(tools: str) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in json.loads(tools)}


def _as_template(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        shown["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.calls
        ]
    if message.role == "tool":
        shown |= {"tool_call_id": message.call_id, "name": message.name}
    return shown
