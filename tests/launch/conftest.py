"""A small task and a random tiny model, made once for all tests of launch; and what every real run there has to keep."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.observe.metric_names import undescribed
from mrl.prepare import arithmetic, new_model
from tests.support.written_metrics import written_names


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train.jsonl, validation.jsonl and model/ (random Qwen3-MoE, 4 layers, 8 experts)."""
    folder = arithmetic.write(tmp_path_factory.mktemp("task"), largest=20, num_validation=64, num_sft=100)
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    model = ModelSection(path=str(folder / "model"), new=new, max_length=32)
    new_model.ensure(model, [str(folder / "train.jsonl")], seed=0)
    return folder


@pytest.fixture(autouse=True)
def _every_written_metric_is_in_the_list(tmp_path: Path) -> Iterator[None]:
    """Whatever the driver, trainer ranks, engine ranks and reward workers of a test's runs wrote."""
    yield
    assert undescribed(written_names(tmp_path)) == []
