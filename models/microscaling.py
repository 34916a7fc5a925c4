"""mxfp4, the form in which gpt-oss's folders hold their experts, and where they lie in it. Pure.

A matrix [rows, columns] of each expert is cut into blocks of 32 columns. Of a block `X_blocks` holds 16 bytes, each of
two E2M1 numbers, the lower half first, and `X_scales` the exponent of a power of two, plus 127 (E8M0):
weight = number * 2 ** (scale - 127). Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3, 5.4.1 and 6.3; the order
of bytes is that of transformers 5.19, integrations/mxfp4.py. Rows lie as trainer and engine hold them, not transposed.
"""

from __future__ import annotations

from mrl.models.tensors import CheckpointTensor

BLOCK = 32
"""Numbers under one scale, along a row."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that hold one."""


def stored_shapes(tensor: CheckpointTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes in the folder of the blocks and scales of a stacked checkpoint tensor.

    >>> stored_shapes(CheckpointTensor("down_proj", (8 * 64, 96), "bfloat16", stack=8))
    ((8, 64, 3, 16), (8, 64, 3))
    """
    rows, columns = tensor.shape
    scales = (tensor.stack, rows // tensor.stack, columns // BLOCK)
    return (*scales, BLOCK // 2), scales
