"""What is refused of a layout on its nodes: engines that nodes share unequally, dp ranks without experts to share."""

import os
import socket
from pathlib import Path

import pytest

from mrl.capacity.requirements import node_numbers, unmet
from mrl.cli import main
from mrl.config.load import load
from mrl.errors import ConfigError
from mrl.observe.run_folder import RunFolder
from mrl.rollout.part import schedulers
from mrl.training.hf.hf_folder import read_config
from tests.tiny_models import tiny_config, write_model

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def found(folder: Path, *words: str, nodes: list[int], gpus: bool) -> list[str]:
    """What is said of a run of the folder's model on slots of these nodes."""
    paths = [f"model.path={folder}", "data.train=t.jsonl", "model.max_length=16", "data.max_prompt_tokens=8"]
    config = load([QUICKSTART], [*paths, "rollout.max_response_tokens=8", *words])
    return unmet(config, read_config(folder), nodes, gpus=gpus)


def test_a_second_job_on_a_run_folder_names_host_and_pid_of_the_first(task, tmp_path, capsys) -> None:
    first = RunFolder(tmp_path / "quickstart")
    words = [f"run.folder={tmp_path}", f"model.path={task}/model", f"data.train={task}/train.jsonl"]
    assert main(["train", str(QUICKSTART), *words]) == 2
    first.close()
    assert f"is in use by host {socket.gethostname()} pid {os.getpid()};" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [True, False])
def test_engines_that_fit_their_nodes_pass(task: Path, gpus: bool) -> None:
    words = ("training.layout={dp: 4}", "rollout.tp=2")
    assert found(task / "model", *words, nodes=[0, 0, 1, 1], gpus=gpus) == []


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("heads"), num_attention_heads=4, num_key_value_heads=4)


def test_an_engine_over_nodes_has_equal_shares_or_is_refused_with_a_way_out(four_heads: Path) -> None:
    words = (
        "training.layout={dp: 4, ep: 1}",
        "rollout={tp: 4, expert_parallel: true, max_response_tokens: 8}",
    )
    assert found(four_heads, *words, nodes=[0, 0, 1, 1], gpus=True) == []
    assert found(four_heads, *words, nodes=[0, 1, 2, 3], gpus=True) == []
    (line,) = found(four_heads, *words, nodes=[0, 0, 0, 1], gpus=True)
    assert "rollout.tp = 4: engine 0 would have 3 + 1 of its tp ranks on nodes [0, 1]" in line
    assert "choose a rollout.tp that divides the slots of a node, or that they divide" in line


def test_an_engine_that_begins_inside_a_node_may_end_in_the_next(task: Path) -> None:
    words = ("training.layout={dp: 4}", "rollout.tp=2")
    assert found(task / "model", *words, nodes=[0, 0, 0, 1], gpus=True) == []
    config = load([QUICKSTART], words)
    (first, second) = schedulers(config, [0, 0, 0, 1])
    assert first.further() == [] and [part.name for part in second.further()] == ["engine 1, node 1"]


def test_an_engine_of_a_pool_that_nodes_share_unequally_is_refused_with_a_way_out(four_heads: Path) -> None:
    """Its slots follow the trainer's."""
    pool = ("training.layout={dp: 2, ep: 1}", "launch.engine_slots=4")
    pool += ("rollout={tp: 4, expert_parallel: true, max_response_tokens: 8}",)
    assert found(four_heads, *pool, nodes=[0, 0, 1, 1, 1, 1], gpus=True) == []
    assert found(four_heads, *pool, nodes=[0, 0, 0, 0, 1, 1], gpus=True) == []
    (line,) = found(four_heads, *pool, nodes=[0, 0, 0, 1, 1, 1], gpus=True)
    assert "engine 0 would have 1 + 3 of its tp ranks on nodes [0, 1]" in line
    assert "divides the slots of a node and the 2 slots of the trainer before them" in line


def test_messages_between_processes_of_one_gpu_are_refused(task: Path) -> None:
    words = ("training.layout={ep: 1, dp: 2}", "rollout.tp=1", "sync.transport=distributed")
    (line,) = found(task / "model", *words, nodes=[0, 0], gpus=True)
    assert "sync.transport = distributed with engines on the trainer's GPUs" in line and "set auto" in line
    assert found(task / "model", *words, nodes=[0, 0], gpus=False) == []
    own = (*words, "launch.engine_slots=1")
    assert found(task / "model", *own, nodes=[0, 0, 0], gpus=True) == []


def test_nodes_are_filled_one_after_the_other() -> None:
    assert node_numbers(5, 2) == [0, 0, 1, 1, 2]


def test_biases_that_the_routers_do_not_have_cannot_move(task: Path) -> None:
    words = ("training.layout={dp: 1, ep: 1}", "rollout.tp=1", "training.router_bias_rate=0.001")
    (line,) = found(task / "model", *words, nodes=[0], gpus=False)
    assert line.startswith(
        "training.router_bias_rate = 0.001: the routers of qwen3_moe have no correction biases"
    )


def test_adapters_leave_the_biases_alone() -> None:
    """Their checkpoints hold nothing of the base model."""
    with pytest.raises(ConfigError, match=r"router_bias_rate = 0\.001 with training\.lora"):
        load([QUICKSTART], ["training.router_bias_rate=0.001", "training.lora={rank: 4}"])


def test_experts_that_a_family_does_not_split_are_dealt_out(tmp_path: Path) -> None:
    """gpt-oss, whose experts' second biases belong to one rank: by the trainer and by engines."""
    folder = tmp_path / "gpt_oss"
    tiny_config("gpt_oss", num_attention_heads=8).save_pretrained(folder)
    whole = (
        "training.layout={dp: 2, ep: 2}",
        "rollout={tp: 2, expert_parallel: true, max_response_tokens: 8}",
    )
    assert found(folder, *whole, nodes=[0, 0], gpus=True) == []
    (line,) = found(folder, whole[0], "rollout.tp=2", nodes=[0, 0], gpus=True)
    assert "rollout.tp = 2: the experts of gpt_oss are dealt out whole" in line
    (line,) = found(
        folder, "training.layout={tp: 2, dp: 1, ep: 1, etp: 2}", "rollout.tp=1", nodes=[0, 0], gpus=True
    )
    assert "training.layout.etp = 2: the experts of gpt_oss have biases" in line
    quantised = ("rollout.quantization=fp8_block", "rollout.dtype=bfloat16")
    (line,) = found(folder, *whole, *quantised, nodes=[0, 0], gpus=True)
    assert "rollout.quantization = fp8_block: the experts of gpt_oss lie in stacks" in line


def test_a_model_without_experts_has_no_routes_to_replay(tmp_path: Path) -> None:
    words = ("training.layout={dp: 2, ep: 1}", "routing.replay=trainer", "algorithm.minibatches=2")
    dense = write_model(tmp_path / "dense", "qwen3")
    assert found(dense, *words, nodes=[0, 0], gpus=True) == [
        "routing.replay = trainer: the model has no experts to choose from; set it to off"
    ]
    assert found(write_model(tmp_path / "moe"), *words, nodes=[0, 0], gpus=True) == []


@pytest.mark.parametrize("off", ["loop.deterministic=true", "rollout.enable_prefix_caching=false"])
def test_engines_on_gpus_tell_routes_only_with_a_prefix_cache(off: str, task: Path) -> None:
    words = ("training.layout={dp: 2, ep: 1}", "routing.replay=engine")
    assert found(task / "model", *words, nodes=[0, 0], gpus=True) == []
    (line,) = found(task / "model", *words, off, nodes=[0, 0], gpus=True)
    assert off.replace("=", " = ") in line and "set routing.replay = trainer" in line
    assert found(task / "model", *words, off, nodes=[0, 0], gpus=False) == []


@pytest.mark.parametrize("gpus", [True, False])
def test_dp_ranks_may_lie_on_any_nodes(task: Path, gpus: bool) -> None:
    words = (
        "training.layout={dp: 4}",
        "rollout={dp: 2, tp: 2, expert_parallel: true, max_response_tokens: 8}",
    )
    assert found(task / "model", *words, nodes=[0, 0, 1, 1], gpus=gpus) == []
    assert found(task / "model", *words, nodes=[0, 1, 2, 3], gpus=gpus) == []
    (line,) = found(task / "model", *words, nodes=[0, 0, 0, 1], gpus=gpus)
    assert "engine 0, dp rank 1 would lie on 2 nodes and dp rank 0 on 1" in line


def test_dp_needs_experts(task: Path, tmp_path: Path) -> None:
    words = ("training.layout={dp: 6}", "rollout={dp: 3, expert_parallel: true, max_response_tokens: 8}")
    (line,) = found(task / "model", *words, nodes=[0] * 6, gpus=True)
    assert "do not divide into rollout.dp x tp = 3" in line
    dense = write_model(tmp_path / "dense", "qwen3")
    (line,) = found(dense, *words, nodes=[0] * 6, gpus=True)
    assert line.startswith("rollout.dp = 3: the model has no experts to deal out")
