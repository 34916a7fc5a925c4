"""A server process that judges sums, with OpenAI's chat completions and vLLM's classification.

`python -m tests.support.judge_server HOLD [SOCKET]` prints its port, or listens on a Unix socket.
It reads the question's fences. A response with `mode=NAME` gets one of twelve failures; other replies wait
for HOLD calls at once. GET /stats returns the counts. A classifier's model is its number of heads; each head
scores 3 above the one before.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FAILURES = (
    "refused", "broken off", "busy", "down", "silent", "no JSON", "no reply", "no verdict", "cut off",
    "too long",
)  # fmt: skip
_FENCE = re.compile(r"\[([0-9a-f]{16})\]\n(.*?)\n\[/\1\]", re.DOTALL)


class Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hold = 0
    counts = {"calls": 0, "now": 0, "most": 0}
    lock = threading.Condition()

    def do_GET(self) -> None:
        self._send(200, self.counts)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.counts["calls"] += 1
            self.counts["now"] += 1
            self.counts["most"] = max(self.counts["most"], self.counts["now"])
            self.lock.notify_all()
        try:
            self._answer(body)
        finally:
            with self.lock:
                self.counts["now"] -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        if self.path.endswith("/classify"):
            model, total = body.get("model") or "1", float(sum(body["input"]))
            of_heads = [total + 3.0 * h for h in range(int(model))]
            self._send(200, {"data": [{"index": 0, "probs": of_heads, "num_classes": len(of_heads)}]})
            return
        text = body["messages"][0]["content"]
        fences = _FENCE.findall(text)
        response = fences[-1][1]
        mode = re.search(r"mode=([A-Za-z ]+?)(?:\.|$)", response)
        if mode:
            self._fail(mode[1], text)
            return
        with self.lock:
            self.lock.wait_for(lambda: self.counts["most"] >= self.hold, timeout=120.0)
        numbers = re.findall(r"\d+", response)
        self._send(200, _reply(body, "yes" if numbers[-1:] == [fences[-2][1]] else "no", fences[-1][0]))

    def _fail(self, mode: str, text: str) -> None:
        if mode == "silent":
            time.sleep(3.0)
        if mode in ("refused", "broken off", "silent"):
            if mode == "broken off":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
                self.wfile.flush()
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        if mode in ("busy", "down"):
            self._send(429 if mode == "busy" else 503, {"error": mode})
        elif mode == "too much":
            self._send(400, {"error": "the prompt contains 18 input tokens"})
        elif mode == "later":
            self._send(429, {"error": mode}, {"Retry-After": "3600"})
        elif mode in ("no JSON", "too long"):
            self._send(200, "<html>yes</html>" if mode == "no JSON" else "yes" * 2_000_000)
        elif mode == "no reply":
            self._send(200, {"choices": []})
        else:
            line = text.strip().splitlines()[-1] if mode == "cut off" else "No. ... yes, VERDICT: yes"
            ended = "length" if mode == "cut off" else "stop"
            self._send(200, {"choices": [{"message": {"content": line}, "finish_reason": ended}]})

    def _send(self, status: int, reply: Any, headers: dict[str, str] | None = None) -> None:
        data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        return None


def _reply(body: dict[str, Any], verdict: str, nonce: str) -> dict[str, Any]:
    if not body.get("logprobs"):
        choice = {"message": {"content": f"So.\nVERDICT {nonce}: {verdict}"}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"total_tokens": 7}}
    top = [{"token": f" {verdict}", "logprob": math.log(0.9)}]
    top.append({"token": "No" if verdict == "yes" else "Yes", "logprob": math.log(0.09)})
    content = [{"token": verdict, "logprob": math.log(0.9), "top_logprobs": top}]
    return {"choices": [{"logprobs": {"content": content}, "finish_reason": "length"}]}


class Server(http.server.ThreadingHTTPServer):
    """Accepts as many connections at once as a test makes."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def judge_server(
    hold: int = 0, at: str = ""
) -> Iterator[tuple[str, Callable[[], dict[str, int]], subprocess.Popen[str]]]:
    """Yield (address, function that returns the counts, process); `at`: a Unix socket to listen on."""
    words = [sys.executable, "-m", "tests.support.judge_server", str(hold), at]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"

        def stats() -> dict[str, int]:
            with urllib.request.urlopen(f"{url}/stats", timeout=60) as reply:
                return json.loads(reply.read())

        yield url, stats, process
    finally:
        process.kill()
        process.wait(30)


def main() -> None:
    Judge.hold = int(sys.argv[1])
    if sys.argv[2]:
        server: socketserver.BaseServer = UnixServer(sys.argv[2], Judge)
        print(flush=True)
    else:
        server = Server(("127.0.0.1", 0), Judge)
        print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
