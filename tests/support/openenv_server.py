"""Server of OpenEnv's own package, with a game: the sum of the numbers so far; 10 ends it.

`python openenv_server.py DESCRIPTOR` serves at a socket that listens already.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Sum(Observation):
    text: str


class Adding(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> Sum:
        self.total = columns.get("start", 0)
        return Sum(text=f"seed {seed}: {self.total}")

    def step(self, action: Say, timeout_s: float | None = None, **others: Any) -> Sum:
        self.total += int(action.message)
        return Sum(text=str(self.total), reward=self.total == 10, done=self.total >= 10)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Adding, Say, Sum, max_concurrent_envs=4)
    uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
