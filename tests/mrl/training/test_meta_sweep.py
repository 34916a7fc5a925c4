"""Whatever builds tensors for a microbatch runs on "meta": all of it on the device, nothing as large as all pairs of tokens, and
no wait of the host but the objectives' one. What builds tensors is found in the source, so that a new place fails until a piece
runs it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mrl
import mrl.training.passes as passes
import mrl.training.prepared as prepared
from tests.mrl.training.meta_pieces import AROUND, MOST, MOST_PREPARED, NO_WAIT, ONE_WAIT, PIECES, PREPARED
from tests.support.builders import builders
from tests.support.meta_mode import OnMeta, lines_run


@pytest.fixture(autouse=True)
def no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share a vocabulary, and what they tell each other has the same size: on "meta" there is nothing to tell."""

    def nothing(*arguments: Any, **options: Any) -> None: ...

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        """Of the right shape, with the same gradients; torch's own form on "meta" holds all pairs."""
        return query[..., : value.shape[-1]] * key.sum() * value.sum()

    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(dist, name, nothing)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    for module in (passes, prepared):
        monkeypatch.setattr(module.parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
        monkeypatch.setattr(module.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    for name in ("pipeline_model_parallel", "context_parallel", "data_parallel"):
        monkeypatch.setattr(passes.parallel_state, f"get_{name}_group", lambda: None)
    monkeypatch.setattr(passes, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


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


@pytest.mark.parametrize("name", AROUND)
def test_what_is_asked_around_a_pass_waits(name: str) -> None:
    assert waits(AROUND[name])


ROOT = Path(mrl.__file__).parent
SEARCHED = ("models/kernels", "models/megatron", "training", "algorithms")
NOT_FOR_A_MICROBATCH = {
    "training/checkpoint/*": "files",
    "training/hf/*": "files",
    "training/platform/*": "the rank's memory, and agreements of ranks",
    "training/optimizer.py *": "an update's one flag, and moments that are made once",
    "models/kernels/mxfp4.py *": "a folder's blocks, read on the host",
    "models/kernels/rotary.py *": "a table that is made once",
    "models/megatron/lora_parameters.py _start": "parameters",
    "models/megatron/delta_net_layer.py _parameter": "parameters",
    "models/megatron/expert_layer.py _weight": "parameters",
    "models/megatron/packed_attention.py _sinks": "parameters",
    "models/megatron/build.py ValueHead.__init__": "parameters",
    "models/megatron/*.py *.__init__": "parameters",
    "algorithms/advantages.py *": "the driver's arrays, in its memory",
    "algorithms/distillation_terms.py join_advantages": "the driver's arrays",
    "algorithms/groups.py *": "the driver's arrays",
    "algorithms/outcomes.py *": "the driver's arrays",
    "algorithms/recipe.py *": "the driver's arrays",
    "algorithms/reward_rows.py *": "the driver's arrays",
    "algorithms/tokens.py Segments.on_last_token": "the driver's arrays",
    "algorithms/losses.py _made_up": "tokens that a user's loss is tried on before the start",
    "algorithms/preference.py _fault.side": "sides that a user's pair loss is tried on before the start",
}
"""What makes tensors and is not run here, by file and function, and why."""


def test_whatever_makes_tensors_for_a_microbatch_is_swept() -> None:
    ran = lines_run(lambda: [waits(piece) for piece in PIECES.values()], ROOT)
    missing, unused = [], set(NOT_FOR_A_MICROBATCH)
    for file in sorted(file for folder in SEARCHED for file in (ROOT / folder).rglob("*.py")):
        for function, line in builders(file):
            name = f"{file.relative_to(ROOT)} {function}"
            left_out = {pattern for pattern in NOT_FOR_A_MICROBATCH if fnmatch.fnmatch(name, pattern)}
            unused -= left_out
            if not left_out and (str(file), line) not in ran:
                missing.append(f"{name}, line {line}")
    assert not missing, "no piece of meta_pieces.py runs these: " + "; ".join(missing)
    assert not unused
