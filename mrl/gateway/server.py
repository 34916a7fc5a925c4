"""Gateway: the APIs that programs call the policy by, on this machine, one key per trajectory.

| waits for | unblocked by |
|---|---|
| a request | a program |
| a turn of the policy | engines; weight updates only make it longer |

Opening and closing a trajectory are calls, not endpoints. A key opens one trajectory and is void when that
closes. Connections stay alive while trainers hold the GPUs: after KEEP_ALIVE_SECONDS the answer's head is
sent, and then space or comments until the turn is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from mrl.agents.environment import Model
from mrl.gateway.anthropic_messages import (
    message_body,
    message_error,
    message_events,
    read_message,
    read_messages_request,
    read_messages_tool,
)
from mrl.gateway.histories import History, ReadItem
from mrl.gateway.openai_chat import (
    ChatOptions,
    chat_body,
    chat_error,
    chat_events,
    malformed,
    models_body,
    read_chat,
    read_chat_message,
    read_tool,
)
from mrl.gateway.openai_responses import (
    read_function,
    read_item,
    read_response_request,
    response_body,
    response_error,
    response_events,
    response_id,
    response_items,
)
from mrl.gateway.session import ModelSession, RefusedRequest, Reply

KEEP_ALIVE_SECONDS = 20.0
"""Longest silence of a connection: clients give up after minutes, proxies after less."""
MOST_BYTES = 32 << 20
"""Largest body of a request."""
_START_SECONDS = 30.0


class Gateway:
    """HTTP server of all programs of a process. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, ModelSession] = {}
        self._starting = asyncio.Lock()
        self._url = ""
        self._task: asyncio.Task[None] | None = None
        self.num_turns = 0
        """Answered requests."""

    @contextlib.asynccontextmanager
    async def opened(self, session: ModelSession) -> AsyncIterator[Model]:
        """Serve a trajectory's program; at the end its key is void and no turn of it is being generated."""
        url = await self._start()
        key = f"mrl-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        try:
            yield Model(url, key)
        finally:
            del self._sessions[key]
            await session.close()

    async def _start(self) -> str:
        """Start the server, once, on a port of the loopback interface; return its URL."""
        import uvicorn

        async with self._starting:
            if self._task is None:
                listener = socket.create_server(("127.0.0.1", 0))
                config = uvicorn.Config(
                    self._app(), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=600
                )
                server = uvicorn.Server(config)
                self._task = asyncio.ensure_future(server.serve([listener]))
                async with asyncio.timeout(_START_SECONDS):
                    while not server.started:
                        await asyncio.sleep(0.01)
                logging.getLogger("uvicorn").setLevel(logging.WARNING)
                self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self._url

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ]
        )

    async def _chat(self, request: Any) -> Any:
        return await self._served(request, _CHAT)

    async def _messages(self, request: Any) -> Any:
        return await self._served(request, _MESSAGES)

    async def _responses(self, request: Any) -> Any:
        return await self._served(request, _RESPONSES)

    async def _served(self, request: Any, api: _Api) -> Any:
        """Answer a request: whole as soon as its turn is there, or in parts if that takes long."""
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            session = self._session_of(request)
            data = await _body(request)
            chat = _read(api, data, session)
            waiting = asyncio.ensure_future(
                session.answer(
                    chat.history,
                    chat.tools,
                    max_tokens=chat.options.max_tokens,
                    name=xxhash.xxh3_128_hexdigest(data),
                    is_repeated=request.headers.get("x-stainless-retry-count", "0") != "0",
                )
            )
            waiting.add_done_callback(_look)
            await asyncio.wait([waiting], timeout=KEEP_ALIVE_SECONDS)
            if waiting.done():
                reply = self._taken(waiting, chat, session)
                if not chat.options.stream:
                    return JSONResponse(api.body(reply, chat.options, session))
                return StreamingResponse(_each(api.events(reply, chat.options, session)), media_type=_EVENTS)
            return StreamingResponse(
                self._late(waiting, chat, api, session),
                media_type=_EVENTS if chat.options.stream else "application/json",
            )
        except RefusedRequest as error:
            return JSONResponse(api.error(error), status_code=error.status)

    async def _late(
        self, waiting: asyncio.Future[Reply], chat: _Request, api: _Api, session: ModelSession
    ) -> AsyncIterator[str]:
        """Return a late answer in parts, the first of which only keep the connection alive."""
        while not waiting.done():
            yield ": the policy is busy\n\n" if chat.options.stream else " "
            await asyncio.wait([waiting], timeout=KEEP_ALIVE_SECONDS)
        try:
            reply = self._taken(waiting, chat, session)
        except RefusedRequest as error:
            if not chat.options.stream:
                raise  # breaks the connection: the client asks again and gets the refusal as such
            yield f"event: error\ndata: {json.dumps(api.error(error))}\n\n"
            return
        if chat.options.stream:
            for event in api.events(reply, chat.options, session):
                yield event
        else:
            yield json.dumps(api.body(reply, chat.options, session))

    def _taken(self, waiting: asyncio.Future[Reply], chat: _Request, session: ModelSession) -> Reply:
        """Return a turn that is there. Keep its messages if later requests may name it."""
        reply = waiting.result()
        self.num_turns += 1
        if chat.options.is_stored:
            name = _name(reply, session)
            items = map(msgspec.json.encode, response_items(reply, chat.options, name, session.token_text))
            session.stored[response_id(name)] = [*chat.items, *items]
        return reply

    async def _count(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        try:
            session = self._session_of(request)
            chat = _read(_MESSAGES, await _body(request), session)
            return JSONResponse({"input_tokens": session.count_tokens(chat.history, chat.tools)})
        except RefusedRequest as error:
            return JSONResponse(message_error(error), status_code=error.status)

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        try:
            self._session_of(request)
        except RefusedRequest as error:
            return JSONResponse(chat_error(error), status_code=error.status)
        return JSONResponse(models_body())

    def _session_of(self, request: Any) -> ModelSession:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix(
            "Bearer "
        )
        if (session := self._sessions.get(key)) is None:
            raise RefusedRequest(401, "invalid_api_key", "the key belongs to no open trajectory")
        return session


@dataclasses.dataclass(frozen=True, slots=True)
class _Api:
    """Forms of one API."""

    name: str
    field: str
    """Field of a request that has its items."""
    read_options: Callable[[Mapping[str, Any]], ChatOptions]
    read_item: ReadItem
    read_tool: Callable[[Any], Mapping[str, Any]]
    body: Callable[[Reply, ChatOptions, ModelSession], dict[str, Any]]
    events: Callable[[Reply, ChatOptions, ModelSession], Iterator[str]]
    error: Callable[[RefusedRequest], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """A request that was read."""

    options: ChatOptions
    history: History
    tools: str
    """Identity of the tools."""
    items: list[bytes]
    """JSON of the history's items, if later requests may name the response."""


def _name(reply: Reply, session: ModelSession) -> str:
    return f"{session.name}-{reply.turn.number}"


_CHAT = _Api(
    "chat",
    "messages",
    read_chat,
    read_chat_message,
    read_tool,
    lambda reply, chat, session: chat_body(reply, chat, _name(reply, session), session.token_text),
    lambda reply, chat, session: chat_events(reply, chat, _name(reply, session), session.token_text),
    chat_error,
)
_MESSAGES = _Api(
    "messages",
    "messages",
    read_messages_request,
    read_message,
    read_messages_tool,
    lambda reply, chat, session: message_body(reply, chat, _name(reply, session)),
    lambda reply, chat, session: message_events(reply, chat, _name(reply, session)),
    message_error,
)
_RESPONSES = _Api(
    "responses",
    "input",
    read_response_request,
    read_item,
    read_function,
    lambda reply, chat, session: response_body(reply, chat, _name(reply, session), session.token_text),
    lambda reply, chat, session: response_events(reply, chat, _name(reply, session), session.token_text),
    response_error,
)
_EVENTS = "text/event-stream"


async def _body(request: Any) -> bytes:
    """Read a body. Raise RefusedRequest if it is too large."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_BYTES:
            raise RefusedRequest(413, "request_too_large", f"the body has more than {MOST_BYTES >> 20} MiB")
    return bytes(data)


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def _read(api: _Api, data: bytes, session: ModelSession) -> _Request:
    """Read a request. Raise RefusedRequest if it is not JSON or has values of wrong types.

    What earlier requests had is neither parsed nor read again."""
    try:
        body = _FIELDS.decode(data)
        items, tools = body.pop(api.field, None), body.pop("tools", None)
        options = api.read_options({name: msgspec.json.decode(value) for name, value in body.items()})
        known = session.identity_of_tools(api.read_tool, bytes(tools)) if tools and options.with_tools else ""
        parts = [*_earlier(options, session), *_items(api, items)]
        if not parts:
            raise malformed(api.field, f"{api.field} must have at least one item")
        history = session.histories.read(
            parts, api.read_item, system=options.system, tools=known, api=api.name
        )
    except msgspec.MsgspecError as error:
        raise malformed("", f"the body is not valid: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise malformed("", f"the body has a value of the wrong type: {error!r:.200}") from error
    return _Request(options, history, known, [bytes(part) for part in parts] if options.is_stored else [])


def _items(api: _Api, value: msgspec.Raw | None) -> list[msgspec.Raw]:
    """Return the JSON of each item."""
    if value is None:
        return []
    if api is _RESPONSES and memoryview(value)[:1] == b'"':
        return [value]
    try:
        return _LIST.decode(value)
    except msgspec.MsgspecError as error:
        raise malformed(api.field, f"{api.field} must be a list: {error}") from error


def _earlier(options: ChatOptions, session: ModelSession) -> list[bytes]:
    """Return the items up to the response that a request continues."""
    if not options.previous:
        return []
    if (items := session.stored.get(options.previous)) is None:
        reason = (
            f"response {options.previous!r} is not of this trajectory, or was not stored; send the history"
        )
        raise RefusedRequest(400, "previous_response_not_found", reason, "previous_response_id")
    return items


def _look(task: asyncio.Future[Reply]) -> None:
    """Take notice of a request's error, whose client may have gone: it must not end the run."""
    if not task.cancelled():
        task.exception()


async def _each(parts: Iterable[str]) -> AsyncIterator[str]:
    for part in parts:
        yield part
