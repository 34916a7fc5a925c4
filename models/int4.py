"""Describe int4 as compressed-tensors packs it, the format of the experts in Kimi-K2-Thinking's folders.
Pure.

The rows of a matrix [rows, columns] are split into groups of 32 numbers. `X_packed` has eight numbers of a
row per int32, the first in the lowest bits, each plus 8; `X_scale` the scale of each group, in bfloat16;
`X_shape` the two sizes: weight = number * scale in the scale's type. Source: compressed-tensors 0.17,
compressors/pack_quantized, whose own code unpacks them (mrl/training/hf/read_values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP = 32
"""Numbers per scale, along a row."""
BITS = 4
PER_WORD = 32 // BITS
"""Numbers per int32."""
SUFFIXES = ("_packed", "_scale", "_shape")
"""Suffixes of the three tensors that store one."""


def int4_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the folder's shapes of the three tensors that store a matrix.

    >>> int4_shapes((48, 96))
    ((48, 12), (48, 3), (2,))
    """
    rows, columns = shape
    return (rows, columns // PER_WORD), (rows, columns // GROUP), (2,)


def is_supported(settings: Mapping[str, Any]) -> bool:
    """Return True if `quantization_config` (compressed-tensors) requires this format and nothing else."""
    groups = list((settings.get("config_groups") or {}).values())
    required = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    required |= {"actorder": None, "dynamic": False}
    return (
        settings.get("format") == "pack-quantized"
        and settings.get("kv_cache_scheme") is None
        and len(groups) == 1
        and groups[0].get("input_activations") is None
        and groups[0].get("output_activations") is None
        and {key: (groups[0].get("weights") or {}).get(key) for key in required} == required
    )
