"""Stands in for Transformer Engine where there is no GPU: what megatron-core 0.19.2 uses of it, in plain torch.

Names, signatures and parameters are those of transformer_engine 2.20.2 (Apache-2.0); of arguments it takes those that
Megatron passes. What the real kernels of packed training refuse (float32, keys and values of unequal width), it refuses
too. Not here: float8, user buffers, activation off-loading, CUDA graphs. So it can show names, shapes, layouts, state
and arithmetic, and nothing of kernels.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
