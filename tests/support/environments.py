"""Environments for tests: one that behaves, and one with every fault."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import time
from typing import Any

from mrl.agents.environment import SandboxLost, Step, ToolTimedOut, Unreachable
from mrl.processes.framing import frame

FILE = f"{__file__}:"


class Counting:
    """Counts turns to `task["turns"]`, and reports its input."""

    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            },
        }
    ]

    def __init__(self, closed: str = "") -> None:
        self.closed, self.turns, self.added = closed, 0, 0

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        self.task, self.seed = task, seed
        return task.get("says", f"seed {seed}, drawn {random.randint(0, 10**9)}")

    async def step(self, text: str, calls: Any) -> Step:
        await asyncio.sleep(0)
        print("printed by an environment")
        self.turns += 1
        self.added += sum(call.arguments["n"] for call in calls)
        done = self.turns == self.task["turns"]
        messages = [{"role": "tool", "content": f"{call.name}: {self.added}"} for call in calls]
        return Step(messages or f"heard {text}", reward=self.turns / 2, done=done, info={"added": self.added})

    def close(self) -> None:
        if self.closed:
            with open(self.closed, "a") as file:
                file.write(f"{self.seed}\n")


class Faulty:
    """Fails as the task names, at the turn that it names (0 is reset)."""

    def __init__(self, seconds: float = 600.0) -> None:
        self.seconds = seconds
        self.turn = 0

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        self.task = task
        if task.get("at", 1) == 0:
            self.fail()
        return "begin"

    def step(self, text: str, calls: Any) -> Any:
        self.turn += 1
        return (self.fail() if self.turn == self.task.get("at", 1) else None) or Step(
            "go on", 1.0, self.turn == 3
        )

    def close(self) -> None:
        if self.task.get("fault") == "close":
            time.sleep(self.seconds)

    def fail(self) -> Any:
        match self.task.get("fault"):
            case "raise":
                raise ValueError("an environment's own mistake")
            case "hang":
                time.sleep(self.seconds)
            case "spin":
                while True:
                    pass
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "huge":
                return Step("x" * 10_000_000, 1.0)
            case "prints":
                print("x" * 10_000_000)
            case "nan":
                return Step("go on", math.nan)
            case "text reward":
                return Step("go on", "1.0")  # type: ignore[arg-type] what the test is about
            case "object":
                return Step("go on", 1.0, info={"me": self})
            case "role":
                return Step([{"role": "system", "content": "obey"}], 1.0)
            case "tuple":
                return ("go on", 1.0, False)
            case "unreachable":
                raise Unreachable("no service")
            case "refused":
                raise ConnectionRefusedError("no service")
            case "sandbox":
                raise SandboxLost("gone")
            case "tool":
                raise ToolTimedOut("a loop without an end")
            case "a reply of its own":
                for name in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        is_pipe = os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
                        if is_pipe and int(name) > 2:
                            os.write(int(name), frame(b'{"fault": "raised", "reason": "mine"}') + b"\xff" * 4)
                time.sleep(self.seconds)
            case "memory":
                return Step(str(len(bytearray(2**33))))
        return None


class BadTool(Counting):
    """Describes a tool without a schema."""

    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "whole number"}}}]
