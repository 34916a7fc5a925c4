"""Find a model's facts for a capacity estimate, from its published configuration. Reads no weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

from mrl.config.root import Config
from mrl.config.sections.model import ModelSection
from mrl.config.sections.rollout import RolloutSection
from mrl.data.hub_models import CONFIG_FILES, is_hub_name, model_folder
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.models.facts import ModelSize
from mrl.models.hf_config import language_model
from mrl.models.tensors import BLOCK, ParameterRows
from mrl.prepare.new_model import hf_config
from mrl.resharding.planner.quantised import quantises


def row_elements(row: ParameterRows) -> int:
    """Return the elements of an unsplit row, without padding."""
    return sum(s.rows for block in row.blocks for s in block) * math.prod(row.trailing)


def row_bytes(row: ParameterRows, element: int, rollout: RolloutSection) -> int:
    """Return the bytes of an unsplit row in engines; `element` is the size of an unquantised element."""
    count = row_elements(row)
    if rollout.quantization == "none" or not quantises(row.blocks[0][0].tensor):
        return count * element
    return count + -(-count // BLOCK**2) * 4


def find_facts(model: ModelSection) -> ModelSize:
    """Read the model's config.json from its folder, `model.new`, configs/models or the hub; else raise
    ConfigError."""
    config_json = Path(model.path) / "config.json"
    name = Path("models", Path(model.path).name, "config.json")
    if config_json.is_file():
        return _read(config_json, str(config_json))
    if model.new is not None:
        made = hf_config(model.new, vocab_size=model.new.vocab_size, max_length=model.max_length)
        return ModelSize(language_model(made), "model.new (vocabulary at its largest)")
    if (CONFIGS / name).is_file():
        return _read(CONFIGS / name, f"configs/{name}")
    if is_hub_name(model.path):
        folder = Path(model_folder(model.path, "model.path", files=CONFIG_FILES))
        return _read(folder / "config.json", f"{folder}/config.json")
    known = sorted(path.parent.name for path in (CONFIGS / "models").glob("*/config.json"))
    raise ConfigError(
        f"model.path = {model.path} has no config.json, and configs/models has only {known}; set a Hugging "
        "Face folder or put the published config.json there"
    )


def critic_facts(config: Config, policy: ModelSize) -> ModelSize:
    """Return the facts of the critic's model: the policy's unless it starts from another folder."""
    if config.critic is None or not config.critic.path:
        return policy
    return find_facts(ModelSection(path=config.critic.path, max_length=config.model.max_length))


def teacher_facts(config: Config, policy: ModelSize) -> list[ModelSize]:
    """Return the facts of each teacher whose weights a trainer keeps: all but the start under adapters. Those
    of folders without a config.json are the policy's."""
    section = config.algorithm.distillation
    folders = () if section is None else section.folders
    if config.training.lora is not None:
        folders = [folder for folder in folders if not config.model.is_start(folder)]
    length = config.model.max_length
    return [
        find_facts(ModelSection(path=folder, max_length=length))
        if Path(folder, "config.json").is_file()
        else policy
        for folder in folders
    ]


def _read(path: Path, origin: str) -> ModelSize:
    try:
        return ModelSize(language_model(json.loads(path.read_text(encoding="utf-8"))), origin)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
