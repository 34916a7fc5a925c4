"""Describe mxfp4, the format of the experts in gpt-oss's folders. Pure.

Each expert's matrix [rows, columns] is split into blocks of 32 columns. Per block `X_blocks` has 16 bytes of
two E2M1 numbers each, the low half first, and `X_scales` the exponent of a power of two, plus 127 (E8M0):
weight = number * 2 ** (scale - 127). Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3, 5.4.1 and
6.3; byte order of transformers 5.19, integrations/mxfp4.py. Rows are as in trainer and engine, not
transposed.
"""

from __future__ import annotations

from mrl.models.tensors import CheckpointTensor

BLOCK = 32
"""Numbers per scale, along a row."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that store one."""


def stored_shapes(tensor: CheckpointTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the folder's shapes of the blocks and scales of a stacked checkpoint tensor.

    >>> stored_shapes(CheckpointTensor("down_proj", (8 * 64, 96), "bfloat16", stack=8))
    ((8, 64, 3, 16), (8, 64, 3))
    """
    rows, columns = tensor.shape
    scales = (tensor.stack, rows // tensor.stack, columns // BLOCK)
    return (*scales, BLOCK // 2), scales
