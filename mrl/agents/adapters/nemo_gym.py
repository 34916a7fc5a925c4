"""Tasks of a NeMo-Gym resources server, with the policy as their model.

A row is one of the server's data: `responses_create_params`, and what the server's verifier reads. The
protocol is that of NeMo-Gym's simple_agent: POST `/seed_session`, POST `/TOOL` for each call, POST `/verify`;
cookies are the session. Source: https://github.com/NVIDIA-NeMo/Gym (0.4.0, Apache-2.0).

Only the configured address is contacted, with no proxy. A server that does not respond is an infrastructure
failure; a tool that answers with an error shows it to the policy."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

from mrl.agents.environment import Model, Unreachable
from mrl.errors import ConfigError

_OWN_FIELDS = ("prompt", "responses_create_params")


class NemoGym:
    """An episode on the resources server at `url`; what its `verify` returns is the reward."""

    def __init__(self, url: str, *, max_steps: int = 32, seconds: float = 60.0) -> None:
        """`max_steps`: most turns of the policy. `seconds`: limit of one request to the server. Raise
        ConfigError if the address has another form."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"agent.options.url = {url!r} must be an http or https address")
        self._url, self._max_steps, self._seconds = url.rstrip("/"), max_steps, seconds

    async def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        """Return the verifier's reward. Raise Unreachable if the server does not respond as it should."""
        import httpx

        params = task["responses_create_params"]
        given = params["input"]
        history = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        columns = {name: value for name, value in task.items() if name not in _OWN_FIELDS}
        columns["responses_create_params"] = params
        outputs: list[dict[str, Any]] = []
        keyed = {"Authorization": f"Bearer {model.key}"}
        # One client for the server, whose cookies are the session, and one for the policy.
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=self._seconds, trust_env=False) as server,
            httpx.AsyncClient(base_url=model.url, headers=keyed, timeout=None, trust_env=False) as policy,
        ):
            await self._post(server, "/seed_session", columns)
            for _ in range(self._max_steps):
                body = {**params, "model": model.name, "input": history + outputs}
                answer = await policy.post("/v1/responses", json=body)
                answer.raise_for_status()
                response = answer.json()
                outputs += response["output"]
                calls = [item for item in response["output"] if item["type"] == "function_call"]
                if response["status"] != "completed" or not calls:
                    break
                outputs += [await self._called(server, call) for call in calls]
            verdict = await self._post(
                server, "/verify", columns | {"response": response | {"output": outputs}}
            )
        return float(verdict["reward"])

    async def _called(self, server: Any, call: dict[str, Any]) -> dict[str, Any]:
        """Return a tool's output, whatever its status is, as an item of the history.

        The gateway returns calls of the row's tools only, so that the policy cannot choose another path."""
        answer = await self._sent(server, f"/{call['name']}", json.loads(call["arguments"]))
        return {"type": "function_call_output", "call_id": call["call_id"], "output": answer.text}

    async def _post(self, server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._sent(server, path, body)
        try:
            answer.raise_for_status()
            return answer.json()
        except Exception as error:
            raise Unreachable(f"{self._url}{path}: {error}: {answer.text[:300]}") from error

    async def _sent(self, server: Any, path: str, body: dict[str, Any]) -> Any:
        try:
            return await server.post(path, json=body)
        except Exception as error:
            raise Unreachable(f"{self._url}{path}: {error!r}") from error
