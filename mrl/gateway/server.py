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
import hashlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from mrl.agents.environment import Model
from mrl.gateway.anthropic_messages import message_body, message_error, message_events, read_messages_request
from mrl.gateway.openai_chat import (
    ChatRequest,
    chat_body,
    chat_error,
    chat_events,
    conversation_of,
    malformed,
    models_body,
    read_chat,
)
from mrl.gateway.openai_responses import (
    read_response_request,
    response_body,
    response_error,
    response_events,
    response_id,
    with_earlier,
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
            chat = with_earlier(_read(api, data), session.stored)
            waiting = asyncio.ensure_future(
                session.answer(
                    conversation_of(chat),
                    chat.tools,
                    max_tokens=chat.max_tokens,
                    name=hashlib.blake2b(data).hexdigest(),
                    is_repeated=request.headers.get("x-stainless-retry-count", "0") != "0",
                )
            )
            waiting.add_done_callback(_look)
            await asyncio.wait([waiting], timeout=KEEP_ALIVE_SECONDS)
            if waiting.done():
                reply = self._taken(waiting, chat, session)
                if not chat.stream:
                    return JSONResponse(api.body(reply, chat, session))
                return StreamingResponse(_each(api.events(reply, chat, session)), media_type=_EVENTS)
            return StreamingResponse(
                self._late(waiting, chat, api, session),
                media_type=_EVENTS if chat.stream else "application/json",
            )
        except RefusedRequest as error:
            return JSONResponse(api.error(error), status_code=error.status)

    async def _late(
        self, waiting: asyncio.Future[Reply], chat: ChatRequest, api: _Api, session: ModelSession
    ) -> AsyncIterator[str]:
        """Return a late answer in parts, the first of which only keep the connection alive."""
        while not waiting.done():
            yield ": the policy is busy\n\n" if chat.stream else " "
            await asyncio.wait([waiting], timeout=KEEP_ALIVE_SECONDS)
        try:
            reply = self._taken(waiting, chat, session)
        except RefusedRequest as error:
            if not chat.stream:
                raise  # breaks the connection: the client asks again and gets the refusal as such
            yield f"event: error\ndata: {json.dumps(api.error(error))}\n\n"
            return
        if chat.stream:
            for event in api.events(reply, chat, session):
                yield event
        else:
            yield json.dumps(api.body(reply, chat, session))

    def _taken(self, waiting: asyncio.Future[Reply], chat: ChatRequest, session: ModelSession) -> Reply:
        """Return a turn that is there. Keep its messages if later requests may name it."""
        reply = waiting.result()
        self.num_turns += 1
        if chat.is_stored:
            session.stored[response_id(_name(reply, session))] = (*chat.messages, reply.message)
        return reply

    async def _count(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        try:
            session = self._session_of(request)
            chat = _read(_MESSAGES, await _body(request))
            count = session.count_tokens(conversation_of(chat), chat.tools)
            return JSONResponse({"input_tokens": count})
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

    read: Callable[[Any], ChatRequest]
    body: Callable[[Reply, ChatRequest, ModelSession], dict[str, Any]]
    events: Callable[[Reply, ChatRequest, ModelSession], Iterator[str]]
    error: Callable[[RefusedRequest], dict[str, Any]]


def _name(reply: Reply, session: ModelSession) -> str:
    return f"{session.name}-{reply.turn.number}"


_CHAT = _Api(
    read_chat,
    lambda reply, chat, session: chat_body(reply, chat, _name(reply, session), session.token_text),
    lambda reply, chat, session: chat_events(reply, chat, _name(reply, session), session.token_text),
    chat_error,
)
_MESSAGES = _Api(
    read_messages_request,
    lambda reply, chat, session: message_body(reply, chat, _name(reply, session)),
    lambda reply, chat, session: message_events(reply, chat, _name(reply, session)),
    message_error,
)
_RESPONSES = _Api(
    read_response_request,
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


def _read(api: _Api, data: bytes) -> ChatRequest:
    """Read a request. Raise RefusedRequest if it is not JSON or has values of wrong types."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed("", f"the body is not JSON: {error}") from error
    try:
        return api.read(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise malformed("", f"the body has a value of the wrong type: {error}") from error


def _look(task: asyncio.Future[Reply]) -> None:
    """Take notice of a request's error, whose client may have gone: it must not end the run."""
    if not task.cancelled():
        task.exception()


async def _each(parts: Iterable[str]) -> AsyncIterator[str]:
    for part in parts:
        yield part
