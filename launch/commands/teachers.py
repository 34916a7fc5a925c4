"""Check the folders, tokens and domains of `algorithm.distillation` before anything starts.

A teacher runs in the policy's memory and code, so its shapes, all other values of config.json that passes
use, and its tokens must be the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.distillation import DistillationSection
from mrl.errors import ConfigError
from mrl.models import hf_config
from mrl.models.families import family_of
from mrl.samples import Prompt
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.hf.hf_folder import check_folder, read_config

IGNORED = (hf_config.HARMLESS - {"model_type"}) | {"attention_dropout", "quantization_config"}
"""Keys of config.json that no forward pass uses."""


def check_teachers(config: Config) -> None:
    """Check that every teacher's folder has the policy's tensors, config.json and tokenizer."""
    section, policy = config.algorithm.distillation, config.model.path
    if section is None or not Path(policy).exists():
        return
    faults = [line for folder in section.folders for line in _unlike(folder, config)]
    if faults:
        raise ConfigError("\n".join(faults))


def check_domains(section: DistillationSection, prompts: Iterable[Prompt]) -> None:
    """Check that every teacher has rows (`prompts`: training rows) and, with `alone`, every row a teacher."""
    domains = {prompt.domain for prompt in prompts}
    offered = ", ".join(sorted(domains))
    if idle := sorted(set(section.teachers) - domains):
        raise ConfigError(
            f"algorithm.distillation.teachers names the domains {', '.join(idle)}, which have no training "
            f"rows; the rows have: {offered}"
        )
    if section.teachers_only and (untaught := sorted(domains - set(section.teachers))):
        raise ConfigError(
            f"algorithm.distillation.alone = true, but rows of {', '.join(untaught)} have no teacher and "
            "would not be trained on; set a teacher for them, or remove alone"
        )


def _unlike(folder: str, config: Config) -> list[str]:
    """Return why the folder cannot be a teacher of the policy, one sentence per reason."""
    policy = config.model.path
    policy_config, teacher_config = read_config(policy), read_config(folder)
    if differing := _differing(policy_config, teacher_config):
        return [
            f"algorithm.distillation.teachers: {folder} and model.path = {policy} differ in "
            f"{', '.join(differing)} of config.json; a teacher runs in the policy's place and needs its "
            "shapes"
        ]
    check_folder(folder, family_of(policy_config), policy_config)
    has_tokenizer = any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    trust = config.model.trust_remote_code
    if has_tokenizer and _tokens(folder, trust=trust) != _tokens(policy, trust=trust):
        return [
            f"algorithm.distillation.teachers: the tokenizer in {folder} differs from the one in {policy}; a "
            "teacher needs the policy's tokens"
        ]
    return []


def _differing(policy: Mapping[str, Any], teacher: Mapping[str, Any]) -> list[str]:
    names = sorted((policy.keys() | teacher.keys()) - IGNORED)
    return [name for name in names if policy.get(name) != teacher.get(name)]


def _tokens(folder: str, *, trust: bool) -> dict[str, int]:
    return load_tokenizer(folder, trust_remote_code=trust).get_vocab()
