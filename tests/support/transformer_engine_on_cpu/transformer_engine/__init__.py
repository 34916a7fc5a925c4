"""A stand-in for Transformer Engine without a GPU: megatron-core 0.19.2's parts, in plain torch.

Names, signatures and parameters follow transformer_engine 2.20.2 (Apache-2.0), limited to Megatron's
arguments. It refuses what the real packed kernels refuse (float32, keys and values of unequal width), and has
no float8, user buffers, off-loading or CUDA graphs. It checks names, shapes, layouts, state and arithmetic.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
