"""Folders whose linear weights are float8 in square blocks, as DeepSeek-V3 and Qwen3's FP8 models are published. Pure.

`X.weight` holds float8_e4m3fn values and `X.weight_scale_inv` a number for each block of it; weight = value * scale. Blocks
are counted from the tensor's first element, those at its ends may be smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLOCK = 128
"""Edge of a block in published folders and in vLLM's kernels."""
SCALES = "_scale_inv"
"""What the scales' name has after that of the values."""
KEY = "quantization_config"


def stored_block(hf: Mapping[str, Any]) -> int:
    """Edge of a folder's blocks, from its config.json; 0 where it has none."""
    return BLOCK if hf.get(KEY) else 0


def unsupported(hf: Mapping[str, Any]) -> list[str]:
    """What config.json says about quantised weights and is not read, as text."""
    settings = hf.get(KEY)
    if not settings:
        return []
    kind, edges = settings.get("quant_method"), settings.get("weight_block_size")
    known = kind == "fp8" and edges == [BLOCK, BLOCK] and settings.get("fmt", "e4m3") == "e4m3"
    return [] if known else [f"{KEY} = {settings!r} (only fp8 e4m3 in blocks of {BLOCK} x {BLOCK})"]
