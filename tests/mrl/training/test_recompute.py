"""Recomputed activations: nothing of them is kept afterwards."""

from __future__ import annotations

import pytest

from tests.mrl.training import scenarios
from tests.mrl.training.layouts import OneRank
from tests.ranks import run_ranks


@pytest.mark.integration
def test_an_update_with_recompute_keeps_no_hidden_state(one_rank_of: OneRank) -> None:
    """Megatron's dispatchers keep the last probabilities, whose graph ends in the layer's input."""
    folder, _ = one_rank_of.of("qwen3_moe")
    changes = {"recompute": "full", "microbatch_tokens": 1000}
    assert run_ranks(scenarios.kept_hidden_states, 1, str(folder), {}, changes) == [[]]
