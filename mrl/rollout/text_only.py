"""Text-only serving of a folder that contains a vision-language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.models.families import family_of


def text_part_overrides(model_path: str) -> dict[str, Any]:
    """Return vLLM's override of config.json: the class of the language model, without the vision part."""
    hf = json.loads((Path(model_path) / "config.json").read_text())
    return {"architectures": [family_of(hf).engine_class]} if "vision_config" in hf else {}
