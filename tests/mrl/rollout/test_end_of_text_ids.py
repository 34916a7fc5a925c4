"""End-of-text ids, from a model's folder."""

import json
import types
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.rollout.end_of_text_ids import end_of_text


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, (7,)),
        ({}, (7,)),
        ({"eos_token_id": None}, (7,)),
        ({"eos_token_id": 9}, (7, 9)),
        ({"eos_token_id": [9, 7, 11]}, (7, 9, 11)),
    ],
)
def test_the_tokenizers_end_and_those_of_the_generation_config_end_a_response(
    tmp_path: Path, generation_config: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert end_of_text(types.SimpleNamespace(eos_token_id=7), str(tmp_path)) == expected
    without = end_of_text(types.SimpleNamespace(eos_token_id=None), str(tmp_path))
    assert set(without) == set(expected) - ({7} if len(expected) < 3 else set())


@pytest.mark.parametrize(
    ("generation_config", "expected"), [(None, (5,)), ({}, (5,)), ({"eos_token_id": 9}, (9,))]
)
def test_the_models_own_end_counts_if_no_other_file_names_one(
    tmp_path: Path, generation_config: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert end_of_text(types.SimpleNamespace(eos_token_id=None), str(tmp_path)) == expected
    assert end_of_text(types.SimpleNamespace(eos_token_id=7), str(tmp_path))[0] == 7


def test_what_is_no_token_id_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["<end>"]}))
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id must be .*'<end>'"):
        end_of_text(types.SimpleNamespace(eos_token_id=7), str(tmp_path))
