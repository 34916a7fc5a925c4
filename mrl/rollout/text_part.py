"""The model of text in a folder that holds a model of images too, which is all that an engine serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.models.families import family_of


def text_part_overrides(model_path: str) -> dict[str, Any]:
    """What vLLM's reading of config.json is overridden with: the class of the model of text, in the place of one
    that would also make the other and take images."""
    hf = json.loads((Path(model_path) / "config.json").read_text())
    return {"architectures": [family_of(hf).engine_class]} if "vision_config" in hf else {}
