"""Small tasks and random tiny models, made once for all launch tests, and checks of every real run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.launch.commands import this_machine
from mrl.observe.metric_names import undescribed
from mrl.prepare import arithmetic_rows, new_model
from tests.forks.servers import shared
from tests.support import chat_tokenizers
from tests.support.written_metrics import written_names
from tests.tiny_models import write_model


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with train.jsonl, validation.jsonl and model/ (random Qwen3-MoE, 8 experts)."""
    folder = arithmetic_rows.write_arithmetic(
        tmp_path_factory.mktemp("task"), largest=20, num_validation=64, num_sft=100
    )
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    model = ModelSection(path=str(folder / "model"), new=new, max_length=32)
    new_model.ensure_model(model, [str(folder / "train.jsonl")], seed=0)
    return folder


@pytest.fixture(scope="session")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def _memory_of_a_machine_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend 16 GiB of available memory in this process: warnings must not depend on other programs."""
    monkeypatch.setattr(this_machine, "available_memory", lambda: 16 << 30)


@pytest.fixture(autouse=True)
def _fork_servers_stand(request: pytest.FixtureRequest) -> None:
    """Start the fork servers before a test starts threads that need them."""
    if request.node.get_closest_marker("integration"):
        shared()


@pytest.fixture(autouse=True)
def _every_written_metric_is_in_the_list(tmp_path: Path) -> Iterator[None]:
    """Check that every metric written by a test's runs is in the list."""
    yield
    assert undescribed(written_names(tmp_path)) == []
