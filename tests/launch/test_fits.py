"""What is refused before a worker starts: families, engines larger than a node, experts dealt out without a kernel."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from launch.fits import check_engines, check_model
from launch.placement import Placement, Slot
from mrl.cli import main
from mrl.config.load import load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.observe.run_folder import RunFolder

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}


def config(folder: Path, *words: str) -> Config:
    paths = [f"model.path={folder}", "data.train=t.jsonl", "data.validation=null", "model.max_length=16"]
    return load([QUICKSTART], [*paths, *words])


def placement(*nodes: int) -> Placement:
    """Slots on these nodes, by rank."""
    return Placement(None, tuple(Slot(rank, node, str(node)) for rank, node in enumerate(nodes)))


@pytest.fixture
def deepseek(task: Path, tmp_path: Path) -> Path:
    """The task's folder with a DeepSeek-V3 in four bits in place of its model; the tokenizer stays."""
    folder = tmp_path / "deepseek"
    shutil.copytree(task / "model", folder)
    published = Path(__file__).parents[2] / "configs" / "models" / "DeepSeek-V3" / "config.json"
    four_bits = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(json.loads(published.read_text()) | four_bits))
    return folder


def test_a_model_that_training_does_not_implement_ends_with_one_error_before_workers(
    deepseek: Path, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"run.folder={tmp_path}",
        f"data.train={task}/train.jsonl",
        f"data.validation={task}/validation.jsonl",
    ]
    assert main(["train", str(QUICKSTART), f"model.path={deepseek}", *words]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1, errors
    assert "config.json says quantization_config = {'quant_method': 'awq'" in errors[0]
    assert "training does not implement that for deepseek_v3" in errors[0]
    assert not list((tmp_path / "quickstart" / "logs").rglob("train-*.log")), "a worker had started"


def test_a_second_job_on_a_run_folder_names_host_and_pid_of_the_first(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = RunFolder(tmp_path / "quickstart")
    words = [f"run.folder={tmp_path}", f"model.path={task}/model", f"data.train={task}/train.jsonl"]
    assert main(["train", str(QUICKSTART), *words]) == 2
    first.close()
    assert f"is in use by host {socket.gethostname()} pid {os.getpid()};" in capsys.readouterr().err


def test_engines_that_fit_their_nodes_pass(task: Path) -> None:
    made = config(task / "model", "training.layout={dp: 4}", "rollout.tp=2")
    check_engines(made, placement(0, 0, 1, 1), gpus=True)
    check_engines(made, placement(0, 0, 1, 1), gpus=False)


def test_an_engine_over_two_nodes_is_refused_with_a_way_out(task: Path) -> None:
    made = config(task / "model", "training.layout={dp: 4}", "rollout.tp=2")
    with pytest.raises(
        ConfigError, match=r"engine 1 would lie on nodes \[0, 1\]; choose a rollout.tp that divides"
    ):
        check_engines(made, placement(0, 0, 0, 1), gpus=True)


def test_a_known_node_size_is_compared_before_the_cluster(task: Path) -> None:
    made = config(task / "model", "training.layout={dp: 4}", "rollout.tp=4", "launch.slots_per_node=2")
    with pytest.raises(ConfigError, match=r"rollout.tp = 4: .* a node has launch.slots_per_node = 2"):
        check_model(made, Tokenizer())


def test_whole_experts_need_a_gpu(task: Path) -> None:
    made = config(task / "model", "training.layout={dp: 2}", "rollout={tp: 2, expert_parallel: true}")
    check_engines(made, placement(0, 0), gpus=True)
    with pytest.raises(ConfigError, match=r"rollout.expert_parallel = true: vLLM's CPU kernels cannot"):
        check_engines(made, placement(0, 0), gpus=False)


def test_every_family_has_a_trainer() -> None:
    from models.build import ENGINE_FAMILIES
    from models.families import FAMILIES

    assert FAMILIES.keys() == ENGINE_FAMILIES.keys()


def test_shapes_without_a_kernel_are_found_before_an_engine_starts(task: Path, tmp_path: Path) -> None:
    hf = json.loads((task / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"head_dim": 48}))
    with pytest.raises(ConfigError, match="head_dim = 48"):
        check_engines(config(tmp_path, "training.layout={dp: 2}"), placement(0, 0), gpus=False)
