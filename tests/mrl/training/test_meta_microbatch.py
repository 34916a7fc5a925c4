"""What a rank prepares of a microbatch, on "meta": all of it on the device, nothing larger than the tokens."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from mrl.models.kernels.rotary import RotaryTable
from mrl.models.layout import Layout
from mrl.models.megatron.layer_choice import LayerChoice
from mrl.models.rope import Rope
from mrl.training.packing import pack_microbatches
from mrl.training.passes import Passes
from tests.support.tensors import tensors
from tests.tiny_models import random_batch

META = torch.device("meta")
WIDTH = 16


def passes(layout: Layout, choice: LayerChoice) -> Passes:
    """Those of rank 0, as far as preparing goes, which asks no process group."""
    rotary = RotaryTable(Rope(1e4, WIDTH), max_length=4096, dtype=torch.bfloat16, device=META)
    rank = object.__new__(Passes)
    rank._layout, rank._place, rank._device = layout, layout.place(0), META
    rank._chunks = types.SimpleNamespace(rotary=rotary, choice=choice, window=None)  # type: ignore[assignment]
    return rank


@pytest.mark.parametrize(
    ("layout", "choice"),
    [(Layout(), LayerChoice(False)), (Layout(tp=2, cp=4), LayerChoice(True))],
    ids=["local", "transformer-engine-cp4"],
)
def test_a_prepared_microbatch(layout: Layout, choice: LayerChoice) -> None:
    batch = random_batch(6, seed=1, longest=3000)
    plans = pack_microbatches(batch, max_tokens=100_000, num_microbatches=1, tp=layout.tp, cp=layout.cp)
    rank = passes(layout, choice)
    (prepared,) = [rank._to_device(plan, np.ones(batch.num_tokens, bool)) for plan in plans]
    prepared.packed.angles = None  # a table of all positions, made once
    arrays, segments = rank._arrays(batch, prepared.plan)
    found = [*tensors(prepared), *arrays.values(), *tensors(segments), *rank._no_margins([prepared])]
    assert len(found) >= 10
    for x in found:
        assert x.device == META
        assert x.numel() <= 2 * len(prepared.plan.tokens) * WIDTH, tuple(x.shape)
