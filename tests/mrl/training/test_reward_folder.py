"""A reward model's folder: transformers' scores match Megatron's, and scoring another token is refused."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mrl.config.sections.training import LayoutSection
from mrl.data.tune_rows import TuneRow
from mrl.errors import ConfigError, MrlError
from mrl.loops.tuning.row_logprobs import row_scores
from mrl.reward_labels import has_score, num_heads_of_score, require_one_score, reward_model_config
from mrl.training.hf import export_folder
from mrl.training.hf.hf_folder import read_config
from mrl.training.hf.reward_model_folder import RewardFolder, config_of
from tests.mrl.training import scenarios
from tests.mrl.training.critics import set_head
from tests.mrl.training.layouts import name_of
from tests.mrl.training.pair_rows import scored_pairs
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, write_model

TOKENIZER: Any = types.SimpleNamespace(
    pad_token_id=VOCAB - 1, eos_token_id=1, pad_token="<pad>", eos_token="<end>"
)
THREE_CLASSES = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}


def without_padding(rows: tuple[TuneRow, ...]) -> tuple[TuneRow, ...]:
    for row in rows:
        for response in row.responses:
            response.tokens[response.tokens == TOKENIZER.pad_token_id] = 5
    return rows


def scores_and_folder(rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str) -> Any:
    """Return a reward model's scores, its head nonzero, and export it as a folder."""
    at = scenarios.worker(rank, world, port, folder, layout, has_value_head=True)
    if not has_score(read_config(folder)):
        set_head(at.policy)
    scores = row_scores(at, without_padding(scored_pairs()), batch_rows=4)
    shards = Path(out).with_name("shards")
    at.save_weights(shards)
    if rank == 0:
        about = RewardFolder(config_of(folder, TOKENIZER), {"end_tokens": [1]})
        export_folder.export_checkpoint(
            shards, Path(out), source=Path(folder), dtype="float32", reward_model=about
        )
    at.close()
    return scores


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {}),
        pytest.param("qwen3_moe", {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"ep": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param("llama_tied", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_transformers_scores_the_folder_as_megatron_did(
    family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    source, out = write_model(tmp_path / "policy", family), tmp_path / "scores"
    world = LayoutSection(**layout).world_size
    (scores, *_) = run_ranks(scores_and_folder, world, str(source), layout, str(out))
    (again, *_) = run_ranks(scores_and_folder, 1, str(out), {}, str(tmp_path / "again"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    assert model.config.num_labels == 1 and model.config.problem_type == "regression"
    responses = [
        (n, i, response.tokens[:-1])
        for n, row in enumerate(without_padding(scored_pairs()))
        for i, response in enumerate(row.responses)
    ]
    longest, pad = max(len(tokens) for _, _, tokens in responses), model.config.pad_token_id
    padded = np.array([np.pad(t, (0, longest - len(t)), constant_values=pad) for _, _, t in responses])
    ids = torch.from_numpy(padded)
    with torch.no_grad():
        theirs = model(ids, attention_mask=(ids != pad).long()).logits[:, 0].numpy()
    ours = np.array([scores[n][i] for n, i, _ in responses])
    assert ours.std() > 0.05
    assert theirs == pytest.approx(ours, abs=1e-5)
    assert np.array([again[n][i] for n, i, _ in responses]) == pytest.approx(ours, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_token_id": 1, "pad_token": "<end>"}, "pad_token is '<end>' and its eos_token '<end>'"),
        ({"pad_token_id": None, "pad_token": None}, "two different ones"),
    ],
)
def test_a_padding_that_is_the_end_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Qwen3MoeForCausalLM")
    with pytest.raises(ConfigError, match=message):
        config_of(folder, types.SimpleNamespace(**vars(TOKENIZER) | changes))


def test_a_family_without_a_class_in_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no OlmoeForSequenceClassification"):
        config_of(write_config(tmp_path, "OlmoeForCausalLM"), TOKENIZER)


def write_config(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "qwen3_moe"}))
    return folder


def test_the_class_says_whether_a_folder_is_a_reward_model() -> None:
    policy = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 8}
    assert not has_score(policy) and not has_score({})
    assert reward_model_config(policy) == {
        "architectures": ["Qwen3MoeForSequenceClassification"],
        "hidden_size": 8,
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }
    assert has_score(reward_model_config(policy)) and reward_model_config(
        reward_model_config(policy)
    ) == reward_model_config(policy)


def test_the_labels_say_how_many_heads_a_folder_has() -> None:
    policy = {"architectures": ["Qwen3MoeForCausalLM"]}
    assert num_heads_of_score(reward_model_config(policy)) == 1
    require_one_score(reward_model_config(policy), source="x")
    assert num_heads_of_score({"num_labels": 1}) == 1
    assert num_heads_of_score({}) == 2, "as transformers reads it"
    require_one_score(policy, source="a policy has no head yet")
    with pytest.raises(ConfigError, match=r"critic\.path = f gives 3 numbers"):
        require_one_score(reward_model_config(policy) | THREE_CLASSES, source="critic.path = f")


def with_one_score(rank: int, world: int, port: int, folder: str) -> None:
    scenarios.worker(rank, world, port, folder, {}, has_value_head=True)


@pytest.mark.integration
def test_a_folder_of_another_number_of_heads_is_not_loaded(tmp_path: Path) -> None:
    source = write_model(tmp_path / "policy", "qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(reward_model_config(config) | THREE_CLASSES))
    with pytest.raises((MrlError, AssertionError), match="gives 3 numbers"):
        run_ranks(with_one_score, 1, str(source))


@pytest.mark.integration
def test_a_reward_model_is_no_policy(tmp_path: Path) -> None:
    source = write_model(tmp_path / "policy", "qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(reward_model_config(config)))
    with pytest.raises((MrlError, AssertionError), match=r"output_layer\.weight"):
        run_ranks(scenarios.forward_update_export, 1, str(source), {}, str(tmp_path / "out"), {})
