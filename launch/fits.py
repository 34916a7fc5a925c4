"""What can be known before any worker starts: do model, layout, tokenizer and judges fit together?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.placement import Placement
from models.families import family_of, require_trainable
from mrl.config.root import Config
from mrl.errors import ConfigError, RewardError
from mrl.judges.pool import check_judges
from mrl.rollout import limits, quantised
from mrl.samples import Prompt
from resharding.layout import Layout


def check_model(config: Config, tokenizer: Any) -> None:
    """ConfigError where training does not implement the model, the layout does not divide the model, an engine is larger than a node, or
    the tokenizer has ids the model lacks."""
    path = Path(config.model.path) / "config.json"
    hf_config = json.loads(path.read_text(encoding="utf-8"))
    require_trainable(hf_config)
    quantised.require_whole_blocks(hf_config, config.rollout)
    if (slots := config.launch.slots_per_node) and config.rollout.tp > slots:
        raise ConfigError(_larger_than_a_node(config, f"a node has launch.slots_per_node = {slots}"))
    layout = Layout(**config.training.layout.model_dump())
    family = family_of(hf_config)
    for place in layout.places():
        family.local_tensors(hf_config, layout, place)
    largest, size = max(tokenizer.get_vocab().values(), default=0), int(hf_config["vocab_size"])
    if largest >= size:
        raise ConfigError(
            f"the tokenizer in {config.model.path} has ids up to {largest}, the model's vocab_size is {size}; "
            "they do not belong together"
        )
    positions = int(hf_config.get("max_position_embeddings", config.model.max_length))
    if config.model.max_length > positions:
        raise ConfigError(
            f"model.max_length = {config.model.max_length} exceeds the model's {positions} positions ({path})"
        )
    if config.data.max_prompt_tokens + config.rollout.max_response_tokens > config.model.max_length:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_response_tokens} exceeds model.max_length = {config.model.max_length}"
        )


def check_engines(config: Config, placement: Placement, *, gpus: bool) -> None:
    """ConfigError where an engine's ranks would lie on several nodes, or vLLM has no kernel for it on this platform."""
    size = config.rollout.tp
    for engine in range(config.num_engines):
        nodes = sorted({slot.node for slot in placement.slots[engine * size : (engine + 1) * size]})
        if len(nodes) > 1:
            raise ConfigError(_larger_than_a_node(config, f"engine {engine} would lie on nodes {nodes}"))
    if not gpus:
        limits.check_cpu(config.model.path, tp=size, expert_parallel=config.rollout.expert_parallel)
        quantised.require_cpu(config.rollout)


def _larger_than_a_node(config: Config, found: str) -> str:
    return (
        f"rollout.tp = {config.rollout.tp}: an engine's ranks start on one node, and {found}; choose a rollout.tp that divides "
        "the slots of a node"
    )


def check_judging(config: Config, prompts: Sequence[Prompt]) -> None:
    """One trial sample through the judge of each domain; ConfigError with what the judge said."""
    try:
        check_judges(config.judge, prompts)
    except RewardError as error:
        raise ConfigError(f"judge: {error}") from error
