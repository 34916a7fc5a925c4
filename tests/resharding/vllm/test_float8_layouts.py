"""vLLM's own conversions of float8 weights for its GPU kernels change nothing that a weight sync sent.

The kernels need a GPU; the functions that prepare weights for DeepGEMM and FlashInfer are torch and run here.
"""

from types import SimpleNamespace

import pytest
import torch

from mrl.models.tensors import BLOCK
from mrl.resharding.transfer import fp8

pytestmark = pytest.mark.integration


def weights(*shape: int) -> torch.Tensor:
    """Return bfloat16 weights whose blocks have every kind of largest magnitude."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(*shape, generator=generator) * 10 ** torch.empty(*shape[:-1], 1).uniform_(
        -6, 3, generator=generator
    )
    blocks = weight.view(-1, shape[-1])
    blocks[:BLOCK, :BLOCK] = 0
    for number, largest in enumerate((1e-30, 1e-5, 231.9, 232.1, 447.0, 449.0, 463.9, 464.1)):
        rows = slice(BLOCK * (number % 2), BLOCK * (number % 2 + 1))
        cols = slice(BLOCK * (number // 2 + 1), BLOCK * (number // 2 + 2))
        blocks[rows, cols] *= largest / blocks[rows, cols].abs().max()
    return weight.bfloat16()


def sent(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and scales of [..., rows, cols] that a weight sync brings."""
    parts = [weight] if weight.ndim == 2 else list(weight)
    scales = [fp8.block_scales(part, BLOCK) for part in parts]
    values = [fp8.values(part, scale, BLOCK) for part, scale in zip(parts, scales, strict=True)]
    return (values[0], scales[0]) if weight.ndim == 2 else (torch.stack(values), torch.stack(scales))


def wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


@pytest.mark.parametrize("shape", [(256, 768), (3, 256, 768)])
def test_deepgemm_s_powers_of_two_are_ours(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on Hopper vLLM quantises again for DeepGEMM (VLLM_USE_DEEP_GEMM_E8M0), after the sync's proof."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def keep(ws: torch.Tensor, **_: object) -> torch.Tensor:
        return ws  # DeepGEMM's own layout of the scales, which is compiled

    monkeypatch.setattr(fp8_utils, "deepgemm_post_process_weight_scale_block", keep)
    values, scales = sent(weights(*shape))
    loaded = values.clone(), scales.clone()
    for _ in range(2):  # as loaded, and in place as reloaded
        again = fp8_utils.deepgemm_post_process_fp8_weight_block(*loaded, (BLOCK, BLOCK), use_e8m0=True)
        assert torch.equal(again[0].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(again[1], scales)


def test_flashinfer_s_experts_are_the_sent_ones_in_its_order() -> None:
    """FlashInfer's CUTLASS kernels, vLLM's first choice on Hopper with expert parallelism, take up before
    gate."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import prepare_fp8_moe_layer_for_fi

    gate = weights(2, 256, 768)
    up, down = gate.flip(-1), gate.flip(-2)
    w13, w2 = (sent(weight) for weight in (torch.cat([gate, up], 1), down))
    layer = SimpleNamespace(
        moe_config=SimpleNamespace(is_act_and_mul=True),
        weight_block_size=[BLOCK, BLOCK],
        activation=MoEActivation.SILU,
    )
    first, second, first_scales, second_scales = prepare_fp8_moe_layer_for_fi(
        layer, w13[0], w2[0], w13[1], None, w2[1], None
    )
    assert torch.equal(wide(first, first_scales), wide(*sent(torch.cat([up, gate], 1))))
    assert torch.equal(wide(second, second_scales), wide(*sent(down)))
    error = (wide(first, first_scales) - torch.cat([up, gate], 1).float()).norm()
    assert error < 0.03 * gate.float().norm() * 2**0.5
