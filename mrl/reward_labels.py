"""Read from config.json what a reward model returns, by the names of its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError

DEFAULT_LABELS = 2
"""Number of labels that transformers assumes if config.json names none."""

SCORED = "ForSequenceClassification"
"""Suffix of a reward model's class, which returns a score instead of the vocabulary's logits."""


def has_score(hf: Mapping[str, Any]) -> bool:
    """Return True if the folder contains a reward model."""
    return any(str(name).endswith(SCORED) for name in hf.get("architectures") or ())


def num_heads_of_score(hf: Mapping[str, Any]) -> int:
    """Return the number of labels of a reward model's folder, one per score head."""
    return len(hf.get("id2label") or ()) or int(hf.get("num_labels") or DEFAULT_LABELS)


LABEL_KEYS = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
"""Keys of config.json that name a reward model's output: the score of a response."""


def reward_model_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a reward model with the same layers; unchanged if it is one."""
    if has_score(hf):
        return dict(hf)
    name = str(next(iter(hf.get("architectures") or ()), hf.get("model_type")))
    return {**hf, "architectures": [name.partition("For")[0] + SCORED], **LABEL_KEYS}


def require_one_score(hf: Mapping[str, Any], *, source: str) -> None:
    """Raise ConfigError, starting with `source`, unless a reward model returns one score per response;
    `step_score` labels process reward models of earlier releases."""
    if not has_score(hf):
        return
    if (heads := num_heads_of_score(hf)) > 1:
        raise ConfigError(
            f"{source} gives {heads} numbers; classes or the heads of an ensemble are not a reward"
        )
    if "step_score" in (hf.get("id2label") or {}).values():
        raise ConfigError(f"{source} scores the steps of a response, not the response")
