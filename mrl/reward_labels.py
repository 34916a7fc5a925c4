"""What config.json of a reward model's folder says that the model gives, by the names of its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


SCORE = ("score",)
"""The label of a reward model: the score of a response."""

STEP = ("step_score",)
"""The label of a process reward model: the log-odds that the step which ends with the last token is right."""


def scores_steps(hf: Mapping[str, Any]) -> bool:
    """Whether the reward model of a folder gives a score of each step."""
    return _labels_of(hf) == STEP


def _labels_of(hf: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple((hf.get("id2label") or {}).values())


def label_keys(names: Sequence[str]) -> dict[str, Any]:
    """The keys of config.json that name what a reward model gives."""
    return {
        "id2label": {str(head): name for head, name in enumerate(names)},
        "label2id": {name: head for head, name in enumerate(names)},
    }


def reward_model_config(hf: Mapping[str, Any], given: Sequence[str] = SCORE) -> dict[str, Any]:
    """What config.json says of the reward model of the same layers that gives these labels; of a reward model what it says."""
    if has_score(hf):
        return dict(hf)
    name = str(next(iter(hf.get("architectures") or ()), hf.get("model_type")))
    return {**hf, "architectures": [name.partition("For")[0] + SCORED], **label_keys(given)}


def require_labels(hf: Mapping[str, Any], labels: Sequence[str], *, what: str) -> None:
    """ConfigError, which begins with `what`, where the folder holds a reward model that gives something else."""
    own, wanted = _told(_labels_of(hf), num_heads_of_score(hf)), _told(tuple(labels), len(labels))
    if has_score(hf) and own != wanted:
        raise ConfigError(f"{what} is a reward model of {own}, and has to be one of {wanted}")


def _told(labels: tuple[str, ...], heads: int) -> str:
    return "steps" if labels == STEP else f"{heads} head{'s' if heads > 1 else ''}"
