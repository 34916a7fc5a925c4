"""Activations that are computed again: by module, and nothing of them is kept afterwards."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension

from mrl.config.sections.training import TrainingSection
from mrl.models.megatron import build
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import OneRank, check_layout
from tests.ranks import run_ranks
from tests.support.transformer_engine import FOLDER

MODULES: dict[str, list[str]] = {
    "local": ["core_attn", "layernorm"],
    "transformer_engine": ["moe_act", "layernorm"],
}


def test_modules_are_named_only_where_some_are_selected() -> None:
    with pytest.raises(ValueError, match=r"needs training\.recompute = selective"):
        TrainingSection(recompute="full", recompute_modules=["moe"])


def test_megatrons_extension_is_linked_under_a_path_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "an environment"
    folder.mkdir()
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
    for _ in range(2):
        build._quote_torchs_libraries()
        flags = cpp_extension._prepare_ldflags([], False, False, False, False)
        assert f"-L{folder}" in shlex.split(" ".join(flags))


@pytest.mark.integration
@pytest.mark.parametrize("spec", MODULES)
def test_recompute_by_module_changes_nothing(spec: str, one_rank_of: OneRank, tmp_path: Path) -> None:
    folder, expected = one_rank_of.of("qwen3_moe")
    changes: dict[str, Any] = {"recompute": "selective", "recompute_modules": MODULES[spec], "spec": spec}
    check_layout({}, folder, expected, tmp_path, FOLDER, **changes)


@pytest.mark.integration
def test_an_update_with_recompute_keeps_no_hidden_state(one_rank_of: OneRank) -> None:
    """Megatron's dispatchers keep the last microbatch's probabilities, whose graph ends in the layer's input."""
    folder, _ = one_rank_of.of("qwen3_moe")
    changes = {"recompute": "full", "microbatch_tokens": 1000}
    assert run_ranks(scenarios.kept_hidden_states, 1, str(folder), {}, changes) == [[]]
