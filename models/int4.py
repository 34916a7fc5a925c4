"""int4 as compressed-tensors packs it, the form in which Kimi-K2-Thinking's folders hold their routed experts, and where
it lies in it. Pure.

A matrix [rows, columns] is cut along its rows into groups of 32 numbers. `X_packed` holds eight numbers of a row in an
int32, the first in its lowest bits, each plus 8; `X_scale` the scale of each group, in bfloat16; `X_shape` the two sizes:
weight = number * scale in the type of the scale. Source: compressed-tensors 0.17,
compressors/pack_quantized, whose own code unpacks them (mrl/training/hf/read_values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP = 32
"""Numbers under one scale, along a row."""
BITS = 4
PER_WORD = 32 // BITS
"""Numbers in an int32."""
SUFFIXES = ("_packed", "_scale", "_shape")
"""Of the three tensors that hold one."""


def int4_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shapes in the folder of the three tensors that hold a matrix.

    >>> stored_shapes((48, 96))
    ((48, 12), (48, 3), (2,))
    """
    rows, columns = shape
    return (rows, columns // PER_WORD), (rows, columns // GROUP), (2,)


def is_read(settings: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` of the method compressed-tensors asks for this form of some weights, and for nothing
    else."""
    groups = list((settings.get("config_groups") or {}).values())
    asked = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    asked |= {"actorder": None, "dynamic": False}
    return (
        settings.get("format") == "pack-quantized"
        and settings.get("kv_cache_scheme") is None
        and len(groups) == 1
        and groups[0].get("input_activations") is None
        and groups[0].get("output_activations") is None
        and {key: (groups[0].get("weights") or {}).get(key) for key in asked} == asked
    )
