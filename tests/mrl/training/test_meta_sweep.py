"""Microbatch tensors, on "meta": all on the device, none of all token pairs, one host wait (objectives)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

import mrl.training.output_layer as output_layer
from tests.mrl.training.meta_pieces import MOST, MOST_PREPARED, NO_WAIT, ONE_WAIT, PREPARED
from tests.support.meta_mode import OnMeta


@pytest.fixture(autouse=True)
def no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share a vocabulary and exchange equal sizes: on "meta" there is nothing to exchange."""

    def nothing(*arguments: Any, **options: Any) -> None: ...

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        """Attend with the correct shape and gradients; torch's own form on "meta" allocates all pairs."""
        return query[..., : value.shape[-1]] * key.sum() * value.sum()

    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(dist, name, nothing)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    for name in ("pipeline_model_parallel", "context_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda: None)
    monkeypatch.setattr(output_layer, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


def waits(piece: Callable[[], None], most: int = MOST) -> list[str]:
    with OnMeta(most) as seen:
        piece()
    return seen.waits


@pytest.mark.parametrize("name", PREPARED)
def test_what_is_prepared_is_no_larger_than_the_tokens(name: str) -> None:
    assert waits(PREPARED[name], MOST_PREPARED) == []


@pytest.mark.parametrize("name", NO_WAIT)
def test_a_piece_of_a_pass_stays_on_the_device(name: str) -> None:
    assert waits(NO_WAIT[name]) == []


@pytest.mark.parametrize("name", ONE_WAIT)
def test_an_objective_waits_once(name: str) -> None:
    assert [place.partition(",")[0] for place in waits(ONE_WAIT[name])] == ["checked"]
