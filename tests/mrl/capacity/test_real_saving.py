"""The plan's bytes of a checkpoint against those of a real one."""

from pathlib import Path

import pytest

from mrl.capacity.hardware import load_hardware
from mrl.capacity.model_facts import find_facts
from mrl.capacity.saving import saving
from mrl.capacity.training_memory import stage_memory
from mrl.config.load import load
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.files import CONFIGS
from tests.mrl.training import scenarios
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration


def save(rank: int, world_size: int, port: int, folder: Path, training: TrainingSection) -> None:
    worker = scenarios.worker_of(
        rank, world_size, port, ModelSection(path=str(folder), max_length=64), training
    )
    worker.save_checkpoint(folder / "saved", {})
    worker.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_has_the_bytes_that_are_planned(dtype: str, tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "model", hidden_size=256, head_dim=64, moe_intermediate_size=256, vocab_size=512
    )
    words = [
        f"model.path={folder}", f"training.dtype={dtype}", "training.layout.dp=2", "training.layout.ep=2",
    ]  # fmt: skip
    config = load([CONFIGS / "gsm8k.yaml"], words)
    facts = find_facts(config.model)
    models = [(facts.parameters_total, stage_memory(facts, config.training))]
    planned = saving(config, load_hardware("laptop"), models)
    run_ranks(save, config.training.layout.world_size, folder, config.training)
    real = sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file())
    assert real == pytest.approx(planned.num_bytes, rel=0.05)
    assert planned.node_bytes == planned.num_bytes
