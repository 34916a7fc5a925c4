"""The report's page of runs that are being written, for a browser that has the token. It reads run folders and nothing else.

What is read is read when a page asks: without one the process rests. Names in requests are looked up among the runs that
were found at the start or in folders of runs since, and are never part of a path.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mrl.errors import DataError
from mrl.report.page import LIVE, built, page_data, policy, scripts_of
from mrl.watch.folders import Found, last_written, runs_of
from mrl.watch.index import NAMES, NUMBERS, Query
from mrl.watch.run import LiveRun
from mrl.watch.search import Place, list_samples, same_prompt

SLICE = 32 * 10**6
"""Bytes of a file that are read for one answer."""
AT_ONCE = 8
"""Most runs of one page, and most that are kept in memory."""
LIST_SECONDS = 20.0
"""How old the list of runs may be."""
ALLOWED = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'"


class Watch:
    """The runs that are looked at; one request at a time reads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._lock = folders, threading.Lock()
        self._found = runs_of(folders)
        self._listed_at = time.monotonic()
        self._kept: dict[str, LiveRun] = {}
        self._scripts = scripts_of(LIVE)
        self.policy = policy(self._scripts, f"{ALLOWED}; frame-ancestors 'none'")

    def page(self, request: Request) -> Response:
        """The page with what there is now."""
        with self._lock:
            data = self._data(self._asked(request))
        return HTMLResponse(built(data, self._scripts, allowed=ALLOWED))

    def feed(self, request: Request) -> Response:
        """What the page shows, read up to now; 204 where it is what the page has."""
        with self._lock:
            data = self._data(self._asked(request), known=request.query_params.get("version"))
        return Response(status_code=204) if data is None else _json(data)

    def samples(self, request: Request) -> Response:
        """A list of samples by the request's columns, ranges, text and place."""
        asked = request.query_params
        ranges = {
            name: _range(asked, name) for name in NUMBERS if f"{name}-from" in asked or f"{name}-to" in asked
        }
        query = Query({name: asked[name] for name in NAMES if name in asked}, ranges)
        with self._lock:
            runs = self._asked(request)
            place = _place(asked, runs)
            return _json(list_samples(runs, query, asked.get("text", ""), place))

    def prompt(self, request: Request) -> Response:
        """A sample with the others of its prompt, whole."""
        asked = request.query_params
        with self._lock:
            runs = self._asked(request)
            name = asked.get("of", "")
            if name not in runs:
                raise HTTPException(404, "no such run")
            limit = min(1000, int(_number(asked, "limit")))
            return _json(same_prompt(runs, name, int(_number(asked, "number")), limit=limit))

    def _asked(self, request: Request) -> dict[str, LiveRun]:
        """The runs that the request names; without a name those that the command named, or the one that was written last."""
        if time.monotonic() > self._listed_at + LIST_SECONDS:
            with contextlib.suppress(DataError):  # a folder that is gone: its runs say so
                self._found = runs_of(self._folders) | self._found
            self._listed_at = time.monotonic()
        names = request.query_params.getlist("run") or self._first()
        if any(name not in self._found for name in names):
            raise HTTPException(404, "no such run")
        if len(names) > AT_ONCE:
            raise HTTPException(400, f"at most {AT_ONCE} runs at once")
        for name in names:
            self._kept[name] = self._kept.pop(name, None) or LiveRun(self._found[name].path, name)
        while len(self._kept) > AT_ONCE:
            del self._kept[next(iter(self._kept))]
        return {name: self._kept[name] for name in names}

    def _first(self) -> list[str]:
        named = [name for name, run in self._found.items() if run.named]
        return named[:AT_ONCE] or [max(self._found, key=lambda name: last_written(self._found[name].path))]

    def _data(self, runs: dict[str, LiveRun], known: str | None = None) -> Any:
        behind = sum(run.read(SLICE) for run in runs.values())
        version = ".".join(str(run.version) for run in runs.values()) + f".{len(self._found)}"
        if version == known:
            return None
        live = {"version": version, "behind": behind, "shown": list(runs), "listed": _listed(self._found)}
        return page_data([run.tree() for run in runs.values()]) | {"live": live}


class Guard:
    """Lets those in who have the token, in the address once and in a cookie from then on; every answer has the headers."""

    def __init__(self, app: ASGIApp, token: str, cookie: str, policy: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await self._answer(Request(scope))(scope, receive, self._with_headers(send))

    def _answer(self, request: Request) -> ASGIApp:
        if self._is_token(request.query_params.get("token", "")):
            rest = request.url.remove_query_params("token").query
            answer = RedirectResponse("/" + (f"?{rest}" if rest else ""), status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return answer
        if self._is_token(request.cookies.get(self._cookie, "")):
            return self._app
        return PlainTextResponse(
            "The address that `mrl watch` printed has a token, and this one has not.", 403
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _with_headers(self, send: Send) -> Send:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                new = [(name.encode(), value.encode()) for name, value in self._headers.items()]
                message = {**message, "headers": [*message["headers"], *new]}
            await send(message)

        return answer


def make_app(folders: Sequence[Path], *, token: str, cookie: str) -> Guard:
    """The application; `cookie` is the name of the cookie. DataError where the folders have no run."""
    watch = Watch(folders)
    routes = [
        Route("/", watch.page),
        Route("/feed", watch.feed),
        Route("/samples", watch.samples),
        Route("/prompt", watch.prompt),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, compresslevel=1)])
    return Guard(app, token, cookie, watch.policy)


def _listed(found: dict[str, Found]) -> list[dict[str, Any]]:
    return [{"name": name, "folder": str(run.path)} for name, run in sorted(found.items())]


def _json(tree: Any) -> Response:
    return Response(json.dumps(tree, allow_nan=False), media_type="application/json")


def _range(asked: Any, name: str) -> tuple[float, float]:
    low, high = f"{name}-from", f"{name}-to"
    return (
        _number(asked, low) if low in asked else -float("inf"),
        _number(asked, high) if high in asked else float("inf"),
    )


def _number(asked: Any, name: str) -> float:
    try:
        value = float(asked.get(name, ""))
    except ValueError:
        value = float("nan")
    if not -(2.0**53) < value < 2.0**53:
        raise HTTPException(400, f"{name} is no number")
    return value


def _place(asked: Any, runs: dict[str, LiveRun]) -> Place:
    """Where the list goes on; its beginning without `ends`."""
    if "ends" not in asked:
        return Place.newest(runs)
    ends = tuple(int(end) for end in asked["ends"].split(".") if end.isdecimal())
    if len(ends) != len(runs):
        raise HTTPException(400, "ends are not those of the runs")
    return Place(ends, max(0, int(_number(asked, "skip"))))
