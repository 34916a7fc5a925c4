"""Expert routes of an engine's responses: from vLLM on GPUs, from our worker (mrl/cpu/vllm_routes.py) on CPU.

vLLM 0.32 with `enable_return_routed_experts` returns rows of all layers, zeros for those without experts. It
needs the V2 model runner and the prefix cache, because it stores rows with the cache's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError, RolloutError
from mrl.models.families import family_of
from mrl.models.hf_config import field
from mrl.routes import RouteRows, Routes
from mrl.training.hf.hf_folder import read_config

Ask = Callable[..., list[dict[str, Any]]]
"""Call of a function by name on every worker; returns the replies by tensor-parallel rank."""
RouteRequest = tuple[str, int, Any]
"""vLLM's internal request id, the first position whose row is wanted, and vLLM's output of the request."""


class RoutesOnCpu:
    """Routes that the worker of the engine's first rank records."""

    def __init__(self, ask: Ask) -> None:
        """Raise RolloutError if a worker cannot record routes."""
        self._ask = ask
        if errors := [reply["error"] for reply in ask("mrl_capture_routes") if "error" in reply]:
            raise RolloutError(
                "routing.replay = engine: an engine cannot record its routes: " + "\n".join(errors)
            )

    def take(self, parts: Sequence[RouteRequest]) -> list[Routes]:
        """Return the routes of requests that end or leave the engine; the worker forgets them."""
        wanted = [(name, first, _stop(first, output)) for name, first, output in parts]
        first_rank = self._ask("mrl_take_routes", wanted)[0] if wanted else {"routes": []}
        return [Routes((RouteRows(rows, 0, len(rows)),), missing) for rows, missing in first_rank["routes"]]


class RoutesOnGpu:
    """Routes from vLLM's outputs."""

    def __init__(self, model_path: str) -> None:
        hf = read_config(model_path)
        family = family_of(hf)
        self._layers = [n for n in range(field(hf, "num_hidden_layers")) if family.is_moe_layer(hf, n)]

    def take(self, parts: Sequence[RouteRequest]) -> list[Routes]:
        """Return the routes of requests that end or leave the engine."""
        return [self._routes(first, output) for _, first, output in parts]

    def _routes(self, first: int, output: Any) -> Routes:
        rows, wanted = output.outputs[0].routed_experts, _stop(first, output) - first
        if rows is None or not wanted:
            return Routes((), wanted)
        rows = np.ascontiguousarray(rows[:wanted, self._layers])
        return Routes((RouteRows(rows, 0, len(rows)),), wanted - len(rows))


def route_source(model_path: str, ask: Ask) -> RoutesOnCpu | RoutesOnGpu:
    """Return the source of routes for this machine."""
    import torch

    return RoutesOnGpu(model_path) if torch.cuda.is_available() else RoutesOnCpu(ask)


def require_prefix_cache(rollout: RolloutSection, *, deterministic: bool) -> None:
    """Raise ConfigError if an engine on GPUs would record routes without its prefix cache."""
    if deterministic or not rollout.enable_prefix_caching:
        off = "loop.deterministic = true" if deterministic else "rollout.enable_prefix_caching = false"
        raise ConfigError(
            f"routing.replay = engine needs the prefix cache, which {off} disables: on GPUs vLLM stores "
            "routes with the cache's blocks; leave the cache on, or set routing.replay = trainer"
        )


def _stop(first: int, output: Any) -> int:
    """Return one past the last position that led to a token; `first` if none was drawn."""
    count = len(output.outputs[0].token_ids)
    return len(output.prompt_token_ids) + count - 1 if count else first
