"""Harness of which two hundred run at once: a small process without any client's package."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from mrl.agents.environment import Model
from mrl.agents.sandboxes.providers import SandboxLimits, open_sandbox

SECONDS = 600.0
"""Deadline of each wait; far above what a loaded machine needs."""
LIMITS = SandboxLimits(memory_mib=256, disk_mib=1, processes=16, boot_seconds=SECONDS)


class Crowd:
    """Two turns of one conversation, and one of a sub-agent's.

    It begins when `size` programs run. After a first turn, one harness of each prompt is killed, and one
    harness's sandbox; `folder` has a file per start, and per kill. Row: {"prompt": [...], "number": N}."""

    def __init__(self, folder: str, size: int) -> None:
        self._folder, self._size = Path(folder), size

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        self._wait_for_all()
        messages, texts = list(task["prompt"]), list[str]()
        for number in range(2):
            answer = _post(model, "/v1/chat/completions", {"messages": messages})
            texts.append(answer["choices"][0]["message"]["content"] or "")
            messages += [
                {"role": "assistant", "content": texts[-1]},
                {"role": "user", "content": f"{number}?"},
            ]
            if self._is_first("harness", task["number"]):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._is_first("sandbox", task["number"]):
                _lose_sandbox()
        answer = _post(model, "/v1/messages", {"messages": messages[:1], "system": "Be brief."})
        texts += [block.get("text", "") for block in answer["content"]]
        return float(sum(map(str.islower, "".join(texts))) > 2)

    def _wait_for_all(self) -> None:
        (self._folder / "starts" / f"{os.getpid()}-{time.time_ns()}").touch()
        deadline = time.monotonic() + SECONDS
        while len(os.listdir(self._folder / "starts")) < self._size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {self._size} programs run at once")
            time.sleep(0.5)

    def _is_first(self, kind: str, number: int) -> bool:
        """Return True to the first program of a prompt that asks for a kind of kill."""
        try:
            (self._folder / "kills" / f"{kind}-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _lose_sandbox() -> None:
    """Kill a command's bubblewrap, as the kernel does for memory; the sandbox raises SandboxLost."""

    def kill() -> None:
        while True:
            for child in psutil.Process().children():
                if child.name() == "bwrap":
                    child.kill()
                    return
            time.sleep(0.01)

    with open_sandbox(limits=LIMITS) as sandbox:
        threading.Thread(target=kill, daemon=True).start()
        sandbox.run(["sleep", "1000"], seconds=SECONDS)
    raise AssertionError("a sandbox whose bubblewrap was killed has ended well")


def _post(model: Model, path: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(model.url.removeprefix("http://"), timeout=SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"x-api-key": model.key})
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)
    finally:
        connection.close()
