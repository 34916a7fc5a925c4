"""Text-only serving of a folder that contains a vision-language model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mrl.models.families import FAMILIES, family_of
from mrl.models.hf_config import language_model


@dataclasses.dataclass(frozen=True)
class TextModel:
    """vLLM's `hf_overrides`: the text model's part of a config, with changed keys."""

    changes: dict[str, Any]

    def __call__(self, config: Any) -> Any:
        text = config.get_text_config()
        for key, value in self.changes.items():
            setattr(text, key, value)
        return text


def family_overrides(model_path: str) -> dict[str, Any]:
    """Return vLLM's overrides of config.json that a folder's family needs; nothing for unknown families."""
    hf = _config(model_path)
    family = FAMILIES.get(hf.get("model_type", ""))
    return family.engine_overrides(language_model(hf)) if family else {}


def config_overrides(model_path: str, overrides: dict[str, Any]) -> dict[str, Any] | TextModel:
    """Return `overrides` in vLLM's form; in a folder with images they are those of the text model alone."""
    hf = _config(model_path)
    if "vision_config" not in hf:
        return overrides
    tied = bool(language_model(hf).get("tie_word_embeddings", False))
    text = {"architectures": [family_of(hf).engine_class], "tie_word_embeddings": tied}
    return TextModel(text | overrides)


def _config(model_path: str) -> dict[str, Any]:
    return json.loads((Path(model_path) / "config.json").read_text())
