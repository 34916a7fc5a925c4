"""Check the folders, tokens and domains of `algorithm.distillation` before anything starts.

A teacher needs the policy's tokens. If its config.json equals the policy's in all that passes read, it runs
in the policy's place; otherwise it is a model of its own, on the policy's ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mrl.capacity.requirements import unmet
from mrl.config.root import Config
from mrl.config.sections.distillation import DistillationSection
from mrl.errors import ConfigError
from mrl.models.families import family_of
from mrl.models.hf_config import different_values
from mrl.samples import Prompt
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.hf.hf_folder import check_folder, read_config


def check_teachers(config: Config) -> None:
    """Check every teacher's folder, its layout and its tokens."""
    section, policy = config.algorithm.distillation, config.model.path
    if section is None or not Path(policy).exists():
        return
    faults = [line for folder in section.folders for line in _unlike(folder, config)]
    if faults:
        raise ConfigError("\n".join(faults))


def check_domains(section: DistillationSection, prompts: Iterable[Prompt]) -> None:
    """Check that every teacher has rows (`prompts`: training rows) and, with `teachers_only`, every row a
    teacher."""
    domains = {prompt.domain for prompt in prompts}
    offered = ", ".join(sorted(domains))
    if idle := sorted(set(section.teachers) - domains):
        raise ConfigError(
            f"algorithm.distillation.teachers names the domains {', '.join(idle)}, which have no training "
            f"rows; the rows have: {offered}"
        )
    if section.teachers_only and (untaught := sorted(domains - set(section.teachers))):
        raise ConfigError(
            f"algorithm.distillation.teachers_only = true, but rows of {', '.join(untaught)} have no teacher "
            "and would not be trained on; set a teacher for them, or remove teachers_only"
        )


def _unlike(folder: str, config: Config) -> list[str]:
    """Return why the folder cannot be a teacher of the policy, one sentence per reason."""
    policy = config.model.path
    policy_config, teacher_config = read_config(policy), read_config(folder)
    name = f"algorithm.distillation.teachers: {folder}"
    if different_values(policy_config, teacher_config):
        has_experts = bool(family_of(teacher_config).num_experts(teacher_config))
        alone = config.model_copy(update={"training": config.training.for_teacher(has_experts=has_experts)})
        if faults := unmet(alone, teacher_config, (), gpus=False, engines=False):
            return [f"{name}: {fault}" for fault in faults]
    check_folder(folder, family_of(teacher_config), teacher_config)
    sizes = [hf["vocab_size"] for hf in (policy_config, teacher_config)]
    if sizes[0] != sizes[1]:
        return [
            f"{name} has vocab_size = {sizes[1]}, model.path = {policy} {sizes[0]}; a teacher needs the "
            "policy's output tokens"
        ]
    has_tokenizer = any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    trust = config.model.trust_remote_code
    if has_tokenizer and _tokens(folder, trust=trust) != _tokens(policy, trust=trust):
        return [
            f"{name} has another tokenizer than model.path = {policy}; a teacher needs the policy's tokens"
        ]
    return []


def _tokens(folder: str, *, trust: bool) -> dict[str, int]:
    return load_tokenizer(folder, trust_remote_code=trust).get_vocab()
