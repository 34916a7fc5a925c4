"""Small tasks and random tiny models, made once for all tests of launch; and what every real run there has to keep."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.observe.metric_names import undescribed
from mrl.prepare import arithmetic_rows, new_model
from tests.forks.servers import shared
from tests.support import chat_tokenizers
from tests.support.written_metrics import written_names
from tests.tiny_models import write_model


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train.jsonl, validation.jsonl and model/ (random Qwen3-MoE, 4 layers, 8 experts)."""
    folder = arithmetic_rows.write_arithmetic(
        tmp_path_factory.mktemp("task"), largest=20, num_validation=64, num_sft=100
    )
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    model = ModelSection(path=str(folder / "model"), new=new, max_length=32)
    new_model.ensure_model(model, [str(folder / "train.jsonl")], seed=0)
    return folder


@pytest.fixture(scope="session")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and rows for environments.py."""
    folder = tmp_path_factory.mktemp("acting")
    tokenizer = chat_tokenizers.qwen()
    write_model(folder / "model", served=True, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(str(folder / "model"))
    ends = json.dumps({"eos_token_id": list(range(0, 360, 3))})
    (folder / "model/generation_config.json").write_text(ends)
    rows = [
        {"prompt": [{"role": "user", "content": f"count {n}"}], "answer": "", "turns": 1 + n % 4}
        for n in range(24)
    ]
    for name, part in (("train", rows[:16]), ("validation", rows[16:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture(autouse=True)
def _fork_servers_stand(request: pytest.FixtureRequest) -> None:
    """Before a test's own threads ask for them."""
    if request.node.get_closest_marker("integration"):
        shared()


@pytest.fixture(autouse=True)
def _every_written_metric_is_in_the_list(tmp_path: Path) -> Iterator[None]:
    """Whatever the driver, trainer ranks, engine ranks and reward workers of a test's runs wrote."""
    yield
    assert undescribed(written_names(tmp_path)) == []
