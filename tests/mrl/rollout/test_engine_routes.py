"""Routes from vLLM's outputs on GPUs: only layers with experts are kept; missing rows are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mrl.rollout.engine_routes import RoutesOnGpu
from tests.tiny_models import write_model

PROMPT, DRAWN = 4, 3


def output(rows: np.ndarray | None, *, drawn: int = DRAWN) -> Any:
    """The fields of vLLM 0.32's RequestOutput that are read."""
    completion = SimpleNamespace(token_ids=list(range(drawn)), routed_experts=rows)
    return SimpleNamespace(prompt_token_ids=list(range(PROMPT)), outputs=[completion])


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> RoutesOnGpu:
    """Build routes of a model whose first layer has no experts."""
    return RoutesOnGpu(str(write_model(tmp_path_factory.mktemp("model"), "deepseek_v3")))


def rows_of(count: int) -> np.ndarray:
    """Return rows [count, 4, 2] as vLLM gives them, zeros for the first layer."""
    rows = np.arange(1, count * 8 + 1, dtype=np.uint8).reshape(count, 4, 2)
    rows[:, 0] = 0
    return rows


def test_rows_are_of_the_positions_before_drawn_tokens(routes: RoutesOnGpu) -> None:
    """A first request's rows begin at the prompt; a continued one's before its first new token."""
    whole, later = rows_of(PROMPT + DRAWN - 1), rows_of(DRAWN)
    first, second = routes.take([("a", 0, output(whole)), ("b", PROMPT - 1, output(later))])
    assert (len(first), first.missing, len(second), second.missing) == (PROMPT + DRAWN - 1, 0, DRAWN, 0)
    np.testing.assert_array_equal(first.layers([0, 1, 2]), whole[:, 1:])
    np.testing.assert_array_equal(second.layers([0, 1, 2]), later[:, 1:])


def test_what_is_not_there_is_missing(routes: RoutesOnGpu) -> None:
    short, none, idle = routes.take(
        [("a", 0, output(rows_of(4))), ("b", 0, output(None)), ("c", 0, output(None, drawn=0))]
    )
    assert (len(short), short.missing) == (4, PROMPT + DRAWN - 1 - 4)
    assert (len(none), none.missing) == (0, PROMPT + DRAWN - 1)
    assert (len(idle), idle.missing) == (0, 0), "no token was drawn"
