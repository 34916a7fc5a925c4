"""Environments of the package `verifiers`, which call the policy themselves as their model.

Such an environment is a package with a function `load_environment(**arguments)`. It is loaded once, before
all episodes. A row has the columns of the environment's data set: `prompt`, and what its rubric reads
(`answer`, `info`). Source: https://github.com/PrimeIntellect-ai/verifiers (0.3.1)
"""

from __future__ import annotations

import importlib
import json
from typing import Any, ClassVar

from mrl.agents.environment import Model


class Verifiers:
    """An episode of an environment; its rubric's score is the reward."""

    _loaded: ClassVar[Any] = None

    def __init__(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """`name`: of the environment's package or module; `arguments`: of its `load_environment`."""
        if Verifiers._loaded is None:
            self.prepare(name, arguments)

    @classmethod
    def prepare(cls, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Load the environment, for the processes of all episodes."""
        load = importlib.import_module("verifiers").load_environment
        Verifiers._loaded = load(name, **(arguments or {}))

    async def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        """Return the environment's score. Raise RuntimeError if it stopped at an error."""
        row, types = {"example_id": 0, **task}, importlib.import_module("verifiers.types")
        client = types.ClientConfig(api_base_url=model.openai_url, api_key_var="OPENAI_API_KEY")
        output = await self._loaded.run_rollout(row, client, model.name, {})
        if output.get("error"):
            raise RuntimeError(f"the environment stopped: {json.dumps(output['error'], default=str)[:300]}")
        return float(output["reward"])
