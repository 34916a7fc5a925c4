"""A teacher that cannot teach the policy, or has no domain, is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.load import load, split_arguments
from mrl.config.root import Config
from mrl.config.sections.distillation import DistillationSection
from mrl.errors import ConfigError
from mrl.launch.commands.teachers import check_domains, check_teachers
from mrl.samples import Prompt
from tests.launch.tiny_runs import words
from tests.tiny_models import write_model


@pytest.fixture
def teacher(task: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(task / "model", tmp_path / "teacher"))


def config(task: Path, *teachers: Path) -> Config:
    named = {f"domain{number}": str(folder) for number, folder in enumerate(teachers)}
    setting = f"algorithm.distillation.teachers={json.dumps(named)}"
    return load(*split_arguments(words(task, Path("runs"), "run", setting)))


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_policys_own_folder_may_teach(task: Path, teacher: Path) -> None:
    rewrite(teacher, transformers_version="9", router_aux_loss_coef=0.5)
    check_teachers(config(task, teacher, task / "model"))


def test_a_teacher_of_other_shapes_may_teach(task: Path, teacher: Path) -> None:
    write_model(
        teacher, "llama", vocab_size=json.loads((task / "model/config.json").read_text())["vocab_size"]
    )
    check_teachers(config(task, task / "model", teacher))


def test_a_teacher_that_the_layout_cannot_split_is_refused(task: Path, teacher: Path) -> None:
    rewrite(teacher, num_attention_heads=3, num_key_value_heads=3)
    setting = config(task, teacher)
    layout = setting.training.layout.model_copy(update={"tp": 2})
    training = setting.training.model_copy(update={"layout": layout})
    with pytest.raises(ConfigError, match=r"distillation\.teachers: .*3"):
        check_teachers(setting.model_copy(update={"training": training}))


def test_a_teacher_of_another_vocabulary_is_refused(task: Path, teacher: Path) -> None:
    write_model(teacher, "llama", vocab_size=300)
    with pytest.raises(ConfigError, match="has vocab_size = 300"):
        check_teachers(config(task, teacher))


def test_a_teacher_of_another_tokenizer_is_refused(task: Path, teacher: Path) -> None:
    path = teacher / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    first, second, *_ = sorted(vocabulary, key=lambda token: -vocabulary[token])
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="needs the policy"):
        check_teachers(config(task, teacher))


def test_all_faults_are_told_at_once(task: Path, teacher: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(teacher, tmp_path / "other"))
    for folder in (teacher, other):
        write_model(folder, "llama", vocab_size=300)
    with pytest.raises(ConfigError) as caught:
        check_teachers(config(task, teacher, other))
    assert len(str(caught.value).splitlines()) == 2


def prompts(*domains: str) -> list[Prompt]:
    return [Prompt(n, np.zeros(1, np.int32), "", None, domain) for n, domain in enumerate(domains)]


def test_a_teacher_without_rows_is_refused() -> None:
    section = DistillationSection(teachers={"maths": "a", "code": "b"})
    check_domains(section, prompts("maths", "code", "chat"))
    with pytest.raises(ConfigError, match=r"names the domains code, .* the rows have: chat, maths"):
        check_domains(section, prompts("maths", "chat"))


def test_rows_without_a_teacher_are_refused_where_nothing_else_teaches() -> None:
    section = DistillationSection(teachers={"maths": "a"}, teachers_only=True)
    check_domains(section, prompts("maths"))
    with pytest.raises(ConfigError, match="rows of chat have no teacher"):
        check_domains(section, prompts("maths", "chat"))
