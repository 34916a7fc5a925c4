"""What `algorithm.distillation` names is looked at before anything starts: folders, tokens and domains.

A teacher takes the policy's place in the policy's memory, so that it has the policy's shapes, and whatever else of config.json
its passes compute by; its tokens are the policy's.
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
"""Of config.json, what no forward pass of ours computes by."""


def check_teachers(config: Config) -> None:
    """Every teacher's folder has the policy's tensors, and config.json and tokenizer say the same as the policy's."""
    section, policy = config.algorithm.distillation, config.model.path
    if section is None or not Path(policy).exists():
        return
    faults = [line for folder in section.folders for line in _unlike(folder, config)]
    if faults:
        raise ConfigError("\n".join(faults))


def check_domains(section: DistillationSection, prompts: Iterable[Prompt]) -> None:
    """Every teacher has rows to teach, and with `alone` every row has a teacher; `prompts` are the training rows."""
    domains = {prompt.domain for prompt in prompts}
    offered = ", ".join(sorted(domains))
    if idle := sorted(set(section.teachers) - domains):
        raise ConfigError(
            f"algorithm.distillation.teachers names the domains {', '.join(idle)}, of which there are no training rows; there are "
            f"rows of: {offered}"
        )
    if section.alone and (untaught := sorted(domains - set(section.teachers))):
        raise ConfigError(
            f"algorithm.distillation.alone = true, but rows of {', '.join(untaught)} have no teacher and would teach nothing; "
            "name one for them, or remove alone"
        )


def _unlike(folder: str, config: Config) -> list[str]:
    """What makes the folder no teacher of the policy, a sentence each."""
    policy = config.model.path
    own, theirs = read_config(policy), read_config(folder)
    if differing := _differing(own, theirs):
        return [
            f"algorithm.distillation.teachers: {folder} and model.path = {policy} differ in {', '.join(differing)} of config.json; "
            "a teacher runs in the policy's place and has its shapes"
        ]
    check_folder(folder, family_of(own), own)
    has_tokenizer = any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    trust = config.model.trust_remote_code
    if has_tokenizer and _tokens(folder, trust=trust) != _tokens(policy, trust=trust):
        return [
            f"algorithm.distillation.teachers: the tokenizer in {folder} is another than the one in {policy}; a teacher says "
            "something about the policy's tokens only where it reads them as the policy does"
        ]
    return []


def _differing(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted((own.keys() | theirs.keys()) - IGNORED)
    return [name for name in names if own.get(name) != theirs.get(name)]


def _tokens(folder: str, *, trust: bool) -> dict[str, int]:
    return load_tokenizer(folder, trust_remote_code=trust).get_vocab()
