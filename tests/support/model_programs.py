"""Programs that call the policy themselves, for tests: `task["does"]` names what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from mrl.agents.environment import Model, Step, Unreachable

FILE = f"{__file__}:"

ONE_TURN = """
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "from a shell"}]})
answer = json.load(urllib.request.urlopen(request, body.encode()))
print(answer["choices"][0]["message"]["content"])
"""


def ask(model: Model, *messages: dict[str, Any]) -> str:
    """Return the policy's reply; messages have a role and a content."""
    request = urllib.request.Request(f"{model.openai_url}/chat/completions")
    request.add_header("Authorization", f"Bearer {model.key}")
    body = json.dumps({"model": model.name, "messages": messages}).encode()
    with urllib.request.urlopen(request, body, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Worker:
    """Does what its task names."""

    def __init__(self, counts: str = "") -> None:
        """`counts`: file that gets a line per run."""
        self.counts = counts

    def run(self, task: dict[str, Any], seed: int, model: Model) -> Any:
        if self.counts:
            with open(self.counts, "a") as file:
                file.write(f"{task['does']}\n")
        return getattr(self, task["does"])(task, model)

    def scores(self, task: dict[str, Any], model: Model) -> float:
        """Two turns, then a reward."""
        first = ask(model, user("one"))
        ask(model, user("one"), {"role": "assistant", "content": first}, user("two"))
        return 0.75

    def compacts(self, task: dict[str, Any], model: Model) -> Step:
        """Three turns, the last after a summary of the others."""
        first = ask(model, user("one"))
        second = ask(model, user("one"), {"role": "assistant", "content": first}, user("two"))
        ask(model, user(f"summary: {first}; {second}"))
        return Step(reward=1.0, info={"turns": 3})

    def starts_another(self, task: dict[str, Any], model: Model) -> float:
        """A process that finds the policy by its environment's variables."""
        done = subprocess.run([sys.executable, "-c", ONE_TURN], capture_output=True, text=True, timeout=60)
        return float(done.returncode == 0 and done.stdout.startswith("turn"))

    def says_nothing(self, task: dict[str, Any], model: Model) -> float:
        return 1.0

    def raises(self, task: dict[str, Any], model: Model) -> float:
        ask(model, user("one"))
        raise ValueError("a mistake of the program")

    def fails_at_first(self, task: dict[str, Any], model: Model) -> float:
        """Fails once for a reason that is not the policy's."""
        ask(model, user("one"))
        with open(self.counts) as file:
            if len(file.readlines()) < 2:
                raise Unreachable("a service")
        return 0.5

    def dies(self, task: dict[str, Any], model: Model) -> float:
        ask(model, user("one"))
        os._exit(3)

    def hangs(self, task: dict[str, Any], model: Model) -> float:
        ask(model, user("one"))
        time.sleep(600)
        return 0.0

    def talks(self, task: dict[str, Any], model: Model) -> float:
        """More turns than it may have."""
        while True:
            ask(model, user("again"))

    def fills(self, task: dict[str, Any], model: Model) -> float:
        """More text than the context takes, and then less."""
        ask(model, user("one"))
        try:
            ask(model, user("long " * 2000))
        except urllib.error.HTTPError as error:
            if task["gives_up"] or error.code != 400:
                raise
        ask(model, user("a summary"))
        return 0.25

    def rambles(self, task: dict[str, Any], model: Model) -> float:
        """Expects a number in a turn that is cut."""
        return float(ask(model, user("ramble")))

    def fills_and_loses_a_service(self, task: dict[str, Any], model: Model) -> float:
        """A failure of ours after a full context."""
        try:
            ask(model, user("long " * 2000))
        except urllib.error.HTTPError:
            raise Unreachable("a service") from None
        return 0.0

    def judged(self, task: dict[str, Any], model: Model) -> None:
        """No reward of its own."""
        ask(model, user("one"))
