"""config.json of a reward model's folder, such that transformers and vLLM score as the trainer did.

transformers scores the right-most token that is not padding. If padding were the end token, it would score
the token before the end, and vLLM the end. vLLM applies a sigmoid to a single label, unless `problem_type` is
regression.
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
"""Describes a reward model's score: the end tokens where it is read, and its accuracy."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFolder:
    """Files of a reward model that an export writes besides its weights."""

    config: Mapping[str, Any]
    """Keys in which config.json differs from the policy's: config_of()."""
    about: Mapping[str, Any]
    """Contents of ABOUT."""


def config_of(path: str | Path, tokenizer: Any) -> dict[str, Any]:
    """Return the keys in which a reward model's config.json differs from the policy's in the folder `path`.

    Raise ConfigError if transformers has no class for it, or the tokenizer's padding could be mistaken for an
    end.
    """
    hf = read_config(path)
    (name,) = reward_model_config(hf)["architectures"]
    if not hasattr(transformers, name) or "vision_config" in hf:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no {name} for text models of this family, "
            "which a reward model's folder needs; choose a model of another family"
        )
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or end is None or pad == end:
        raise ConfigError(
            f"{path}: the tokenizer's pad_token is {tokenizer.pad_token!r} and its eos_token "
            f"{tokenizer.eos_token!r}, but a reward model needs two different ones, or it scores another "
            "token than in training; set pad_token in tokenizer_config.json to a token that ends no response"
        )
    return {
        "architectures": [name],
        **LABEL_KEYS,
        "problem_type": "regression",
        "pad_token_id": pad,
        "eos_token_id": end,
    }
