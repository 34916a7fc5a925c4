"""The routes of an engine's responses: told by vLLM's outputs on GPUs, kept by our worker on CPU (mrl/cpu/vllm_routes.py).

vLLM 0.32 with `enable_return_routed_experts`: rows of all layers, zeros for those without experts; it needs its second
model runner and the prefix cache, whose blocks its rows are filed with.
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
"""Calls a function of every worker by its name; the answers by tensor-parallel rank, an error among them."""
Part = tuple[str, int, Any]
"""vLLM's name of a request, the first position whose row is wanted, and what vLLM gave out of it."""


class RoutesOnCpu:
    """Kept by the worker of the engine's first rank."""

    def __init__(self, ask: Ask) -> None:
        """RolloutError where a worker cannot."""
        self._ask = ask
        if errors := [answer["error"] for answer in ask("mrl_capture_routes") if "error" in answer]:
            raise RolloutError(
                "routing.replay = engine: an engine cannot tell its routes: " + "\n".join(errors)
            )

    def take(self, parts: Sequence[Part]) -> list[Routes]:
        """Of requests that end or leave the engine, which forgets them."""
        asked = [(name, first, _stop(first, output)) for name, first, output in parts]
        first_rank = self._ask("mrl_take_routes", asked)[0] if asked else {"routes": []}
        return [Routes((RouteRows(rows, 0, len(rows)),), missing) for rows, missing in first_rank["routes"]]


class RoutesOnGpu:
    """Out of vLLM's outputs."""

    def __init__(self, model_path: str) -> None:
        hf = read_config(model_path)
        family = family_of(hf)
        self._layers = [n for n in range(field(hf, "num_hidden_layers")) if family.is_moe_layer(hf, n)]

    def take(self, parts: Sequence[Part]) -> list[Routes]:
        """As on CPU."""
        return [self._of(first, output) for _, first, output in parts]

    def _of(self, first: int, output: Any) -> Routes:
        rows, wanted = output.outputs[0].routed_experts, _stop(first, output) - first
        if rows is None or not wanted:
            return Routes((), wanted)
        rows = np.ascontiguousarray(rows[:wanted, self._layers])
        return Routes((RouteRows(rows, 0, len(rows)),), wanted - len(rows))


def route_source(model_path: str, ask: Ask) -> RoutesOnCpu | RoutesOnGpu:
    """Whoever tells them on this machine."""
    import torch

    return RoutesOnGpu(model_path) if torch.cuda.is_available() else RoutesOnCpu(ask)


def require_prefix_cache(rollout: RolloutSection, *, deterministic: bool) -> None:
    """ConfigError where an engine on GPUs has none."""
    if deterministic or not rollout.enable_prefix_caching:
        off = "loop.deterministic = true" if deterministic else "rollout.enable_prefix_caching = false"
        raise ConfigError(
            f"routing.replay = engine with {off}: on GPUs vLLM files routes with the blocks of its prefix cache, which is "
            "off then; leave the cache on, or set routing.replay = trainer"
        )


def _stop(first: int, output: Any) -> int:
    """One past the last position that led to a token; `first` where none was drawn."""
    count = len(output.outputs[0].token_ids)
    return len(output.prompt_token_ids) + count - 1 if count else first
