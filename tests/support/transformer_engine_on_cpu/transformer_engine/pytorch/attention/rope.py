"""The rotary embedding of packed segments."""

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turn the first D of t [N, H, W] by freqs [positions, 1, 1, D] float32 with equal halves, in float32."""
    assert fused and tensor_format == "thd" and not interleaved and cu_seqlens is not None
    assert freqs.dtype == torch.float32 and cp_size == 1 and cp_rank == 0
    positions = torch.cat([torch.arange(size) for size in cu_seqlens.diff().tolist()])
    angles = freqs[positions, :, 0]
    x, unrotated = t.float().tensor_split([freqs.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    turned = x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned, unrotated), dim=-1).to(t.dtype)
