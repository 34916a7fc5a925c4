"""What config.json of a reward model's folder says, so that transformers and vLLM score what the trainer scored.

transformers scores the right-most token that is not padding: were padding the end token, that would be the one before the end,
where vLLM takes the end. vLLM puts one label through a sigmoid, except where `problem_type` is regression.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from mrl.errors import ConfigError
from mrl.reward_labels import LABEL_KEYS, reward_model_config
from mrl.training.hf.hf_folder import read_config

ABOUT = "reward_model.json"
"""What a reward model's folder says of its score: the end tokens it is read at, how often it was right."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFolder:
    """What an export writes of a reward model beside its weights."""

    config: Mapping[str, Any]
    """The keys in which config.json differs from the policy's: config_of()."""
    about: Mapping[str, Any]
    """What ABOUT holds."""


def config_of(path: str | Path, tokenizer: Any) -> dict[str, Any]:
    """The keys in which config.json of the reward model differs from that of the policy in the folder `path`.

    ConfigError where transformers has no class for it, and where the tokenizer's padding could be mistaken for an end.
    """
    hf = read_config(path)
    (name,) = reward_model_config(hf)["architectures"]
    if not hasattr(transformers, name) or "vision_config" in hf:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no {name} for models of text of this family, which a reward "
            "model's folder needs"
        )
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or end is None or pad == end:
        raise ConfigError(
            f"{path}: the tokenizer's pad_token is {tokenizer.pad_token!r} and its eos_token {tokenizer.eos_token!r}; a reward "
            "model needs two different ones, or the score is of another token than it was trained at: set pad_token in "
            "tokenizer_config.json to a token that ends no response"
        )
    return {
        "architectures": [name],
        **LABEL_KEYS,
        "problem_type": "regression",
        "pad_token_id": pad,
        "eos_token_id": end,
    }
