"""Sort tokens by expert and back; the row map is opaque, so its layout differs from the real one."""

import torch
from torch import Tensor


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """inp [n, H], probs and routing_map [n, E] -> copies [out, H] by expert, probs [out], row map."""
    chosen = routing_map.bool().t()
    tokens = chosen.nonzero()[:, 1]
    assert len(tokens) == num_out_tokens > 0
    return inp.index_select(0, tokens), probs.t().masked_select(chosen), tokens


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: None = None,
    pad_offsets: None = None,
) -> Tensor:
    """Sum a token's copies [n, H] in float32."""
    assert merging_probs is None and restore_shape is not None and pad_offsets is None
    total = torch.zeros(restore_shape, dtype=torch.float32, device=inp.device)
    return total.index_add(0, row_id_map, inp.float()).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    parts = inp.split(split_sizes.tolist())
    return torch.cat([parts[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    return tuple(moe_sort_chunks_by_index(x, split_sizes, sorted_index) for x in (inp, probs))


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("Megatron's dispatchers permute with probabilities")
