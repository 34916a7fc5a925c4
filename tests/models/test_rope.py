"""Rotary embeddings as transformers computes them: frequencies, scales, and the two ways of turning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from mrl.models import rope
from mrl.models.families import family_of
from mrl.models.family import Family
from mrl.models.hf_config import language_model
from mrl.models.kernels.rotary import RotaryTable, inverse_frequencies, rotate, rotate_pairs

PUBLISHED = json.loads(
    (Path(__file__).parents[2] / "configs/models/DeepSeek-V3/config.json").read_text(encoding="utf-8")
)
SMALL = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "beta_fast": 8, "beta_slow": 2,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "published": PUBLISHED,
    "plain": PUBLISHED | {"rope_scaling": None},
    "weights": {"rope_parameters": SMALL | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "no-weights": {"rope_parameters": SMALL},
    "length-of-the-model": {
        "rope_parameters": {k: v for k, v in SMALL.items() if not k.startswith("original")},
        "max_position_embeddings": 64,
    },
    "one-dimension-of-ramp": {"rope_parameters": SMALL | {"beta_fast": 2, "beta_slow": 2}},
}


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name: str) -> None:
    hf = {"qk_rope_head_dim": 64} | CASES[name]
    module = reference.DeepseekV3RotaryEmbedding(DeepseekV3Config(**hf))
    embedding = rope.rope(hf, width=64)
    torch.testing.assert_close(inverse_frequencies(embedding), module.inv_freq, rtol=0, atol=0)
    cos, sin = module(torch.zeros(1), torch.arange(300)[None])
    table = RotaryTable(embedding, max_length=300, dtype=torch.float32, device=torch.device("cpu"))
    torch.testing.assert_close(table.cos, cos[0, :, :32], rtol=0, atol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :32], rtol=0, atol=0)


@pytest.mark.parametrize("length", [64, 1024, 8192])
def test_llama_3s_form_is_that_of_transformers(length: int) -> None:
    """Frequencies of all three kinds: kept, blended, divided."""
    settings = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": length,
    }  # fmt: skip
    hf = {"hidden_size": 256, "num_attention_heads": 2, "rope_parameters": settings}
    expected = LlamaRotaryEmbedding(LlamaConfig(**hf)).inv_freq
    frequencies = inverse_frequencies(rope.rope(hf, width=128))
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0)
    plain = inverse_frequencies(rope.Rope(5e5, 128))
    assert (frequencies == plain).any() and (frequencies == plain / 8).any()
    assert ((frequencies != plain) & (frequencies != plain / 8)).any()
    settings["rope_type"] = "default"
    assert torch.equal(inverse_frequencies(rope.rope(hf, width=128)), plain)


def test_queries_grow_with_their_position_as_in_transformers() -> None:
    hf = {
        "model_type": "ministral3", "head_dim": 16, "rope_parameters": SMALL | {"llama_4_scaling_beta": 0.3},
    }  # fmt: skip
    table = RotaryTable(
        family_of(hf).rotary(hf), max_length=200, dtype=torch.float32, device=torch.device("cpu")
    )
    factors = get_llama_4_attn_scale(torch.arange(200)[None], 0.3, 32)[0, 0]
    assert table.query_factors is not None and table.query_factors[31] == 1 < table.query_factors[32]
    torch.testing.assert_close(table.query_factors[:, 0], factors)


def test_what_lies_beyond_the_turned_part_stays() -> None:
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 1, 2)
    turned = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], angles.cos(), angles.sin()))


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
def test_a_share_of_the_head_is_said_in_two_places(hf: dict[str, Any]) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 2}
    assert Family().rotary(hf | shape) == rope.Rope(1e4, 16)
    assert Family().rotary({"rope_theta": 1e4} | shape) == rope.Rope(1e4, 32)


def test_turned_pairs_have_the_products_of_transformers() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 1, 8, dtype=torch.float64)
    angles = torch.randn(5, 1, 4, dtype=torch.float64)
    ours = [rotate_pairs(x, angles.cos(), angles.sin()) for x in (q, k)]
    doubled = [torch.cat((x, x), -1)[:, 0][None] for x in (angles.cos(), angles.sin())]
    theirs = reference.apply_rotary_pos_emb_interleave(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], *doubled
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b[0].transpose(0, 1))
    # The halves of a head in which even dimensions come first are its pairs.
    evens_first = torch.cat((q[..., 0::2], q[..., 1::2]), -1)
    torch.testing.assert_close(rotate(evens_first, angles.cos(), angles.sin()), ours[0])


def test_a_sequence_may_be_as_long_as_yarn_stretches_the_model() -> None:
    """vLLM counts so too, also if a user added the settings to config.json; every published one agrees."""
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    hf = {"max_position_embeddings": 40960, "rope_scaling": settings}
    assert rope.max_positions(hf) == 131072
    assert rope.max_positions({"max_position_embeddings": 40960}) == 40960 and rope.max_positions({}) is None
    folders = Path(__file__).parents[2] / "configs/models"
    for path in folders.glob("*/config.json"):
        published = language_model(json.loads(path.read_text()))
        assert rope.max_positions(published) == published["max_position_embeddings"], path
