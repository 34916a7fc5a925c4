"""Servers of `reward.engines`: checked before anything starts, running before the first sample."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from mrl.capacity import requirements
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.launch.cluster.cluster import address_of, own_gpus
from mrl.models.hf_config import language_model
from mrl.models.rope import max_positions
from mrl.rewards.judges.judge_rules import EngineSection
from mrl.rewards.judges.reward_model_judge import ConversationEncoder
from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.rewards.pool.engines import served, verifiers_of_engine, visible_gpus
from mrl.samples import Prompt
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.hf.hf_folder import read_config, tensor_files


def check_engines(config: Config) -> None:
    """Check that the folders have models of the required kind, and that their GPUs exist and are not shared;
    read no weights. Raises ConfigError with one line per fault."""
    faults: list[str] = []
    for name, engine in config.reward.engines.items():
        try:
            _check_folder(engine, verifiers_of_engine(config.reward, name))
        except ConfigError as error:
            faults += [f"reward.engines.{name}: {line}" for line in str(error).splitlines()]
    faults += _gpu_faults(config)
    if faults:
        raise ConfigError("\n".join(faults))


def _check_folder(engine: EngineSection, parts: Sequence[KindPart]) -> None:
    """Check an engine's folder; `parts`: the verifiers that use it, all of one kind."""
    hf = read_config(engine.model)
    head, known = str((hf.get("architectures") or ["no known model"])[0]), max_positions(language_model(hf))
    if known is not None and (engine.max_length or 0) > known:
        raise ConfigError(f"max_length = {engine.max_length} exceeds the {known} positions of {engine.model}")
    if absent := sorted({path.name for path in tensor_files(engine.model).values() if not path.is_file()}):
        raise ConfigError(f"{engine.model} lacks {len(absent)} weights files, the first is {absent[0]}")
    if parts[0].kind == "reward_model":
        ConversationEncoder(engine.model)  # raises ConfigError if it is unusable
        return
    if not head.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise ConfigError(f"{engine.model} is {head}; kind = llm needs a model that generates text")
    is_given = any(word.split("=")[0] == "--chat-template" for word in engine.arguments)
    if not is_given and not getattr(load_tokenizer(engine.model), "chat_template", None):
        raise ConfigError(
            f"{engine.model} has no chat template; set one with arguments: [--chat-template, FILE]"
        )


def _gpu_faults(config: Config) -> list[str]:
    return requirements.reward_engines(config, gpus=own_gpus(), joins=bool(address_of(config.launch)))


@contextlib.contextmanager
def with_engines(config: Config) -> Iterator[Config]:
    """Run the reward engines, if any, for a command without workers; yield the configuration to use."""
    if not config.reward.engines:
        yield config
        return
    check_engines(config)
    with served(config.reward) as section:
        yield config.model_copy(update={"reward": section})


@contextlib.contextmanager
def without_gpus_of(section: RewardSection) -> Iterator[None]:
    """Hide the reward engines' GPUs, except those that are also slots, from processes started inside."""
    used = {gpu for engine in section.engines.values() if not engine.shares_slots for gpu in engine.gpus}
    if not used:
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        visible_gpus([g for g in range(own_gpus()) if g not in used])
    )
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ.update({} if before is None else {"CUDA_VISIBLE_DEVICES": before})


def asks_engine(section: RewardSection, prompt: Prompt) -> bool:
    """Return True if a verifier of the prompt's domain uses a reward engine, and so is tried later."""
    return any(part.engine is not None for part in section.for_domain(prompt.domain).verifiers())
