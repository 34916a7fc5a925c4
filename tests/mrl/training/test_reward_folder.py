"""A reward model's folder: what Megatron scored, transformers scores too, and what scores another token is refused."""

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
from mrl.loops.tuning.row_logprobs import Scores, row_scores, row_step_scores
from mrl.reward_labels import (
    SCORE,
    STEP,
    has_score,
    num_heads_of_score,
    require_labels,
    reward_model_config,
    scores_steps,
)
from mrl.training.hf import export_folder
from mrl.training.hf.hf_folder import read_config
from mrl.training.hf.reward_model_folder import RewardFolder, config_of
from tests.mrl.training import scenarios
from tests.mrl.training.critics import set_head
from tests.mrl.training.layouts import name_of
from tests.mrl.training.pair_rows import scored_pairs, scored_steps
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, write_model

TOKENIZER: Any = types.SimpleNamespace(
    pad_token_id=VOCAB - 1, eos_token_id=1, pad_token="<pad>", eos_token="<end>"
)
CLASSES = ("bad", "fair", "good")


def without_padding() -> tuple[TuneRow, ...]:
    """Rows none of whose tokens is the padding."""
    known = scored_pairs()
    for row in known:
        for each in row.responses:
            each.tokens[each.tokens == TOKENIZER.pad_token_id] = 5
    return known


def scores_and_folder(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str
) -> Scores:
    """The scores of a reward model with a head that is not 0, written as a folder; then that folder's own."""
    at = scenarios.worker(rank, world, port, folder, layout, value_labels=SCORE)
    if not has_score(read_config(folder)):
        set_head(at.policy)
    found = row_scores(at, without_padding(), batch_rows=4)
    shards = Path(out).with_name("shards")
    at.save_weights(shards)
    if rank == 0:
        export_folder.export_checkpoint(
            shards,
            Path(out),
            source=Path(folder),
            dtype="float32",
            reward_model=RewardFolder(config_of(folder, TOKENIZER, SCORE), {"end_tokens": [1]}),
        )
    at.close()
    return found


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
    (found, *_) = run_ranks(scores_and_folder, world, str(source), layout, str(out))
    (again, *_) = run_ranks(scores_and_folder, 1, str(out), {}, str(tmp_path / "again"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    assert model.config.num_labels == 1 and model.config.problem_type == "regression"
    responses = [
        (n, i, each.tokens[:-1])
        for n, row in enumerate(without_padding())
        for i, each in enumerate(row.responses)
    ]
    longest, pad = max(len(tokens) for _, _, tokens in responses), model.config.pad_token_id
    padded = np.array([np.pad(t, (0, longest - len(t)), constant_values=pad) for _, _, t in responses])
    ids = torch.from_numpy(padded)
    with torch.no_grad():
        theirs = model(ids, attention_mask=(ids != pad).long()).logits[:, 0].numpy()
    ours = np.array([found[n][i] for n, i, _ in responses])
    assert ours.std() > 0.05
    assert theirs == pytest.approx(ours, abs=1e-5)
    assert np.array([again[n][i] for n, i, _ in responses]) == pytest.approx(ours, abs=1e-5)


def step_scores_and_folder(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str
) -> dict[int, np.ndarray]:
    """The scores of judged steps, and the process reward model written as a folder."""
    at = scenarios.worker(rank, world, port, folder, layout, value_labels=STEP)
    set_head(at.policy)
    found = row_step_scores(at, steps_without_padding(), batch_rows=4)
    shards = Path(out).with_name("shards")
    at.save_weights(shards)
    if rank == 0:
        about = RewardFolder(config_of(folder, TOKENIZER, STEP), {"end_tokens": [1]})
        export_folder.export_checkpoint(
            shards, Path(out), source=Path(folder), dtype="float32", reward_model=about
        )
    at.close()
    return found


def steps_without_padding() -> tuple[TuneRow, ...]:
    known = scored_steps()
    for row in known:
        tokens = row.responses[0].tokens
        tokens[tokens == TOKENIZER.pad_token_id] = 5
    return known


@pytest.mark.integration
def test_transformers_scores_what_ends_with_a_step_as_megatron_did(tmp_path: Path) -> None:
    """The score of a step is the folder's score of all that ends with it."""
    source, out = write_model(tmp_path / "policy", "qwen3_moe"), tmp_path / "scores"
    (found, *_) = run_ranks(step_scores_and_folder, 1, str(source), {}, str(out))
    hf = read_config(out)
    assert scores_steps(hf) and has_score(hf) and num_heads_of_score(hf) == 1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    for number, row in enumerate(steps_without_padding()):
        (each,) = row.responses
        ends = np.flatnonzero(each.mask)
        with torch.no_grad():
            theirs = [float(model(torch.from_numpy(each.tokens[None, :end])).logits) for end in ends]
        assert found[number].tolist() == pytest.approx(theirs, abs=1e-5)
    scores = np.concatenate(list(found.values()))
    assert scores.std() > 0.05 and len(scores) == sum(len(row.step_labels) for row in steps_without_padding())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pad_token_id": 1, "pad_token": "<end>"}, "pad_token is '<end>' and its eos_token '<end>'"),
        ({"pad_token_id": None, "pad_token": None}, "two different ones"),
    ],
)
def test_a_padding_that_is_the_end_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Qwen3MoeForCausalLM")
    with pytest.raises(ConfigError, match=said):
        config_of(folder, types.SimpleNamespace(**vars(TOKENIZER) | changes), SCORE)


def test_a_family_without_a_class_in_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no OlmoeForSequenceClassification"):
        config_of(write_config(tmp_path, "OlmoeForCausalLM"), TOKENIZER, SCORE)


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
    require_labels(reward_model_config(policy), SCORE, what="x")
    assert num_heads_of_score({"num_labels": 1}) == 1
    assert num_heads_of_score({}) == 2, "as transformers reads it"
    require_labels(policy, SCORE, what="a policy has no head yet")
    with pytest.raises(
        ConfigError, match=r"critic.path = f is a reward model of 3 heads, and has to be one of 1"
    ):
        require_labels(reward_model_config(policy, CLASSES), SCORE, what="critic.path = f")
    require_labels(reward_model_config(policy, STEP), STEP, what="x")
    with pytest.raises(ConfigError, match="x is a reward model of steps, and has to be one of 1 head"):
        require_labels(reward_model_config(policy, STEP), SCORE, what="x")
    with pytest.raises(ConfigError, match="x is a reward model of 1 head, and has to be one of steps"):
        require_labels(reward_model_config(policy), STEP, what="x")
    assert scores_steps(reward_model_config(policy, STEP)) and not scores_steps(reward_model_config(policy))


def with_one_score(rank: int, world: int, port: int, folder: str) -> None:
    scenarios.worker(rank, world, port, folder, {}, value_labels=SCORE)


@pytest.mark.integration
def test_a_folder_of_another_number_of_heads_is_not_loaded(tmp_path: Path) -> None:
    source = write_model(tmp_path / "policy", "qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(reward_model_config(config, CLASSES)))
    with pytest.raises(
        (MrlError, AssertionError), match="is a reward model of 3 heads, and has to be one of 1"
    ):
        run_ranks(with_one_score, 1, str(source))


@pytest.mark.integration
def test_a_reward_model_is_no_policy(tmp_path: Path) -> None:
    source = write_model(tmp_path / "policy", "qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(reward_model_config(config)))
    with pytest.raises((MrlError, AssertionError), match=r"output_layer\.weight"):
        run_ranks(scenarios.forward_update_export, 1, str(source), {}, str(tmp_path / "out"), {})
