"""What config.json of a reward model's folder says that the model gives, by the names of its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError

DEFAULT_LABELS = 2
"""What transformers takes a config.json to mean that names no labels."""

SCORED = "ForSequenceClassification"
"""How the class of a reward model ends: it gives a score in the place of the vocabulary's logits."""


def has_score(hf: Mapping[str, Any]) -> bool:
    """Whether the folder holds a reward model."""
    return any(str(name).endswith(SCORED) for name in hf.get("architectures") or ())


def num_heads_of_score(hf: Mapping[str, Any]) -> int:
    """The labels of a reward model's folder, each the score of a head."""
    return len(hf.get("id2label") or ()) or int(hf.get("num_labels") or DEFAULT_LABELS)


LABEL_KEYS = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
"""The keys of config.json that name what a reward model gives: the score of a response."""


def reward_model_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of the reward model of the same layers; of a reward model what it says."""
    if has_score(hf):
        return dict(hf)
    name = str(next(iter(hf.get("architectures") or ()), hf.get("model_type")))
    return {**hf, "architectures": [name.partition("For")[0] + SCORED], **LABEL_KEYS}


def require_one_score(hf: Mapping[str, Any], *, what: str) -> None:
    """ConfigError, which begins with `what`, where the folder holds a reward model that gives something else than one score of a
    response; `step_score` is the label of the process reward models of earlier releases."""
    if not has_score(hf):
        return
    if (heads := num_heads_of_score(hf)) > 1:
        raise ConfigError(
            f"{what} gives {heads} numbers; classes, or the heads of an ensemble, are not a reward"
        )
    if "step_score" in (hf.get("id2label") or {}).values():
        raise ConfigError(f"{what} scores the steps of a response, not the response")
