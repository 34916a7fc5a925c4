"""The general matrix product that Megatron's router uses."""

import torch
from torch import Tensor


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: None = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: None = None,
    ub_type: None = None,
    extra_output: None = None,
    bulk_overlap: bool = False,
) -> list[Tensor | None]:
    """Return B A plus `bias` in float32, column-major, transposed by `layout`: "TN" is B A^T."""
    assert out is None and layout in ("TN", "NN", "NT")
    left, right = B.float(), A.float()
    product = left @ right.t() if layout == "TN" else left @ right if layout == "NN" else left.t() @ right
    if bias is not None:
        product = product + bias.float()
    return [product.to(out_dtype or B.dtype), None, None, None]
