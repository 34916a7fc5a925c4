"""Layouts that are refused: engines that nodes share unequally, dp ranks without experts to share."""

from pathlib import Path

import pytest

from mrl.capacity.requirements import node_numbers, unmet
from mrl.config.load import load
from mrl.rollout.engine_process import schedulers
from mrl.training.hf.hf_folder import read_config
from tests.tiny_models import tiny_config

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MODELS = {
    "moe": ("qwen3_moe", {"served": True, "moe_intermediate_size": 64}),
    "four_heads": ("qwen3_moe", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "dense": ("qwen3", {}),
    "gpt_oss": ("gpt_oss", {"num_attention_heads": 8}),
}


def found(folder: Path, model: str, words: str, nodes: str, *, gpus: bool) -> list[str]:
    """Return the messages about a run of the model on slots of these nodes, one digit per slot."""
    family, changes = MODELS[model]
    tiny_config(family, **changes).save_pretrained(folder)
    paths = [f"model.path={folder}", "data.train=t.jsonl", "model.max_length=16", "data.max_prompt_tokens=8"]
    config = load([QUICKSTART], [*paths, "rollout.max_response_tokens=8", *words.split("; ")])
    return unmet(config, read_config(folder), [int(node) for node in nodes], gpus=gpus)


PAIRS = "training.layout={dp: 4}; rollout.tp=2"
OVER = "training.layout={dp: 4, ep: 1}; rollout={tp: 4, expert_parallel: true, max_response_tokens: 8}"
POOL = f"training.layout={{dp: 2, ep: 1}}; launch.engine_slots=4; {OVER.split('; ')[1]}"
RANKS = "training.layout={dp: 4}; rollout={dp: 2, tp: 2, expert_parallel: true, max_response_tokens: 8}"
THREE = "training.layout={dp: 6}; rollout={dp: 3, expert_parallel: true, max_response_tokens: 8}"
MESSAGES = "training.layout={ep: 1, dp: 2}; rollout.tp=1; sync.transport=distributed"
STACKS = "training.layout={dp: 2, ep: 2}; rollout={tp: 2, expert_parallel: true, max_response_tokens: 8}"
REPLAY = "training.layout={dp: 2, ep: 1}; routing.replay=engine"
TRAINER = "training.layout={dp: 2, ep: 1}; routing.replay=trainer; algorithm.minibatches=2"


@pytest.mark.parametrize(
    ("model", "words", "nodes", "gpus"),
    [
        ("moe", PAIRS, "0011", True),
        ("moe", PAIRS, "0011", False),
        ("moe", PAIRS, "0001", True),
        ("four_heads", OVER, "0011", True),
        ("four_heads", OVER, "0123", True),
        ("four_heads", POOL, "001111", True),
        ("four_heads", POOL, "000011", True),
        ("moe", RANKS, "0011", True),
        ("moe", RANKS, "0123", False),
        ("moe", MESSAGES, "00", False),
        ("moe", f"{MESSAGES}; launch.engine_slots=1", "000", True),
        ("gpt_oss", STACKS, "00", True),
        ("moe", TRAINER, "00", True),
        ("moe", REPLAY, "00", True),
        ("moe", f"{REPLAY}; loop.deterministic=true", "00", False),
        ("moe", f"{REPLAY}; rollout.enable_prefix_caching=false", "00", False),
    ],
)
def test_what_can_run_passes(model: str, words: str, nodes: str, gpus: bool, tmp_path: Path) -> None:
    assert found(tmp_path, model, words, nodes, gpus=gpus) == []


@pytest.mark.parametrize(
    ("model", "words", "nodes", "gpus", "message"),
    [
        ("four_heads", OVER, "0001", True,
         "rollout.tp = 4: engine 0 would have 3 + 1 of its tp ranks on nodes [0, 1] ... "
         "choose a rollout.tp that divides the slots of a node, or a multiple of them"),
        ("four_heads", POOL, "000111", True,
         "engine 0 would have 1 + 3 of its tp ranks on nodes [0, 1] ... "
         "divides the slots of a node and the 2 slots of the trainer before them"),
        ("moe", RANKS, "0001", True, "engine 0, dp rank 1 would be on 2 nodes and dp rank 0 on 1"),
        ("moe", RANKS, "0001", False, "engine 0, dp rank 1 would be on 2 nodes and dp rank 0 on 1"),
        ("moe", THREE, "000000", True, "are not divisible by rollout.dp x tp = 3"),
        ("dense", THREE, "000000", True, "rollout.dp = 3: the model has no experts to distribute"),
        ("moe", MESSAGES, "00", True,
         "sync.transport = distributed with engines on the trainer's GPUs ... set auto"),
        ("gpt_oss", f"{STACKS.split("; ")[0]}; rollout.tp=2", "00", True,
         "rollout.tp = 2 would split the experts of gpt_oss"),
        ("gpt_oss", "training.layout={tp: 2, dp: 1, ep: 1, etp: 2}; rollout.tp=1", "00", True,
         "training.layout.etp = 2 would split the experts of gpt_oss"),
        ("gpt_oss", f"{STACKS}; rollout.quantization=fp8_block; rollout.dtype=bfloat16", "00", True,
         "rollout.quantization = fp8_block: the experts of gpt_oss are stacked"),
        ("dense", TRAINER, "00", True,
         "routing.replay = trainer: the model has no experts to choose from; set it to off"),
        ("moe", f"{REPLAY}; loop.deterministic=true", "00", True,
         "loop.deterministic = true ... set routing.replay = trainer"),
        ("moe", f"{REPLAY}; rollout.enable_prefix_caching=false", "00", True,
         "rollout.enable_prefix_caching = false ... set routing.replay = trainer"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_a_way_out(model, words, nodes, gpus, message, tmp_path) -> None:
    (line,) = found(tmp_path, model, words, nodes, gpus=gpus)
    assert all(part in line for part in message.split(" ... ")), line


def test_an_engine_that_begins_inside_a_node_may_end_in_the_next() -> None:
    (first, second) = schedulers(load([QUICKSTART], PAIRS.split("; ")), [0, 0, 0, 1])
    assert first.other_nodes() == [] and [part.name for part in second.other_nodes()] == ["engine 1, node 1"]


def test_nodes_are_filled_one_after_the_other() -> None:
    assert node_numbers(5, 2) == [0, 0, 1, 1, 2]
