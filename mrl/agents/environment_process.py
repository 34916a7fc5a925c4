"""Process of one episode: an environment's object, and its calls one after another.

consumes      frames of JSON: ["describe"], ["open", task, seed], ["step", text, calls], ["close"];
              ["run", task, seed, url, key] of a program that calls the policy itself
produces      one frame of JSON per call: the answer's fields, or {"fault": its name, "reason"}
waits for     the next frame; ends with its host
never does    answer twice, or continue after a fault
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import numbers
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mrl.agents.answer import NAMED, EnvironmentFault, is_reward
from mrl.agents.environment import EpisodeEnded, Model, Step
from mrl.agents.tool_calls import ToolCall
from mrl.processes.framing import frame, read_frame
from mrl.user_code import place_of


class _Wrong(Exception):
    """The environment's answer is not valid."""

    def __init__(self, fault: EnvironmentFault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


def serve(make: Callable[[], Any], requests: int, replies: int) -> None:
    """Answer calls until a fault, or until the environment is closed. `make` makes its object."""
    guest = _Guest(make)
    with os.fdopen(requests, "rb") as stream, os.fdopen(replies, "wb") as channel:
        while (payload := read_frame(stream)) is not None:
            operation, *arguments = json.loads(payload)
            reply = guest.answer(operation, arguments)
            channel.write(frame(reply))
            channel.flush()
            if operation == "close":
                return


class _Guest:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._loop = make, asyncio.new_event_loop()
        self._environment: Any = None
        self._operations: dict[str, Callable[..., dict[str, Any]]] = {
            "describe": self._describe,
            "open": self._open,
            "step": self._step,
            "run": self._run,
            "close": self._close,
        }

    def answer(self, operation: str, arguments: list[Any]) -> bytes:
        """Return the reply as JSON."""
        try:
            return _json(self._operations[operation](*arguments))
        except _Wrong as wrong:
            return _fault(wrong.fault, str(wrong))
        except EpisodeEnded as ended:
            return _fault(NAMED.get(ended.ended_by, EnvironmentFault.RAISED), _described(ended))
        except ConnectionError as error:
            return _fault(EnvironmentFault.UNREACHABLE, _described(error))
        except Exception as error:
            return _fault(EnvironmentFault.RAISED, _described(error))

    def _describe(self) -> dict[str, Any]:
        self._environment = self._make()
        tools = getattr(self._environment, "tools", None) or []
        if any(not isinstance(tool, Mapping) for tool in tools):
            raise _Wrong(EnvironmentFault.CONTRACT, "tools must be a list of JSON schemas")
        replayable = getattr(self._environment, "replayable", True)
        runs = hasattr(self._environment, "run")
        about = str(getattr(self._environment, "about", ""))
        return {
            "tools": [dict(tool) for tool in tools],
            "replayable": bool(replayable),
            "runs": runs,
            "about": about,
        }

    def _open(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        self._seed(seed)
        self._environment = self._make()
        observation = self._awaited(self._environment.reset(task, seed))
        return {"messages": _messages(observation), "reward": None, "done": False, "info": {}}

    def _step(self, text: str, calls: list[list[Any]]) -> dict[str, Any]:
        step = self._awaited(self._environment.step(text, [ToolCall(*call) for call in calls]))
        if not isinstance(step, Step):
            raise _Wrong(EnvironmentFault.CONTRACT, f"step must return a Step, not {type(step).__name__}")
        return self._answer(step)

    def _run(self, task: dict[str, Any], seed: int, url: str, key: str) -> dict[str, Any]:
        self._seed(seed)
        model = Model(url, key)
        os.environ.update(model.variables())
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
        self._environment = self._make()
        result = self._awaited(self._environment.run(task, seed, model))
        if result is None or isinstance(result, numbers.Real):
            result = Step(reward=result)  # type: ignore[arg-type]
        if not isinstance(result, Step):
            raise _Wrong(
                EnvironmentFault.CONTRACT,
                f"run must return a number, a Step or None, not {type(result).__name__}",
            )
        return self._answer(dataclasses.replace(result, done=True))

    def _answer(self, step: Step) -> dict[str, Any]:
        if step.reward is not None and not is_reward(step.reward):
            raise _Wrong(EnvironmentFault.REWARD, f"the reward {step.reward!r} is not a finite number")
        return {
            "messages": _messages(step.observation),
            "reward": None if step.reward is None else float(step.reward),
            "done": bool(step.done),
            "info": dict(step.info),
        }

    def _close(self) -> dict[str, Any]:
        if (close := getattr(self._environment, "close", None)) is not None:
            self._awaited(close())
        return {}

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(_wait_for(value)) if inspect.isawaitable(value) else value


async def _wait_for(value: Any) -> Any:
    return await value


def _messages(value: Any) -> list[dict[str, str]]:
    """Return the messages of an observation; none for an empty text."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list | tuple) or any(not isinstance(message, Mapping) for message in value):
        raise _Wrong(
            EnvironmentFault.CONTRACT, f"an observation must be text or messages, not {type(value).__name__}"
        )
    return [dict(message) for message in value]


def _json(reply: dict[str, Any]) -> bytes:
    try:
        return json.dumps(reply, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _Wrong(EnvironmentFault.CONTRACT, f"an answer is not valid JSON: {error}") from error


def _fault(fault: EnvironmentFault, reason: str) -> bytes:
    return json.dumps({"fault": fault.value, "reason": reason[:500]}).encode()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}{place_of(error)}"
