"""Whose layers a trainer rank is built of: Transformer Engine's on GPUs, our own and Megatron's elsewhere.

Decided once, from the configuration, the device and what is installed; everything else asks the choice.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch

from mrl.config.sections.training import TrainingSection
from mrl.errors import ConfigError
from mrl.models.tensors import TRAINER, TRANSFORMER_ENGINE, Spec

FUSED_TYPES = (torch.bfloat16, torch.float16)
"""What Transformer Engine's kernels for packed attention take."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerChoice:
    """The layers of all model chunks of a rank."""

    transformer_engine: bool
    """Transformer Engine's layers with their fusions, experts in grouped products among them."""
    flex: bool = False
    """Tokens go to their experts through DeepEP's kernels, else through all-to-all exchanges."""
    dtype: torch.dtype = torch.bfloat16
    """Of parameters and products."""
    replays: bool = False
    """Whether routers may be given the experts of each token, which Transformer Engine's fused choice cannot be."""
    fused_delta_rule: bool = False
    """Whether flash-linear-attention's kernels compute the rule of delta nets, else torch."""

    @property
    def spec(self) -> Spec:
        """How the parameters are named."""
        return TRANSFORMER_ENGINE if self.transformer_engine else TRAINER

    @property
    def fused_attention(self) -> bool:
        """Whether Transformer Engine's attention is used. In float32 our own is, which knows packed segments in
        every type: of the fused kernels none does."""
        return self.transformer_engine and self.dtype in FUSED_TYPES

    def fields(self, training: TrainingSection, *, is_moe: bool) -> dict[str, Any]:
        """Megatron's settings that follow: its fusions, and how tokens travel.

        Gradients of Transformer Engine's weights are summed into the float32 buffers by its own products
        (build.py); Megatron's setting for that would also ask for Apex, for the output layer.
        """
        fields: dict[str, Any] = {
            # dense models too: the default dispatcher is refused with uneven lengths
            "moe_token_dispatcher_type": "flex" if self.flex else "alltoall",
            "bias_activation_fusion": self.transformer_engine,
        }
        if self.flex:
            fields["moe_flex_dispatcher_backend"] = "deepep"
        if is_moe:
            fields |= {
                "moe_grouped_gemm": self.transformer_engine,
                "moe_permute_fusion": self.transformer_engine,
                # the fused choice of experts is in float32
                "moe_router_fusion": self.transformer_engine
                and training.router_dtype == "fp32"
                and not self.replays,
            }
        return fields


def choose_layers(
    training: TrainingSection, device: torch.device, *, replays: bool = False, own_attention: bool = False
) -> LayerChoice:
    """What training.spec and training.dispatcher say, or else what the device, the environment and the model have
    (Family.own_attention).

    ConfigError where something that is asked for is not installed, or does not go together.
    """
    wanted, dtype = training.spec, getattr(torch, training.dtype)
    on_gpu = device.type == "cuda"
    engine = wanted == "transformer_engine"
    if wanted == "auto":
        engine = _installed("transformer_engine") and on_gpu and not own_attention
    elif engine and own_attention:
        raise ConfigError(
            "training.spec = transformer_engine: attention sinks are implemented in our own attention alone; set local or auto"
        )
    if engine and not _installed("transformer_engine"):
        raise ConfigError(
            "training.spec = transformer_engine, and transformer_engine is not installed in the trainer's "
            "environment; install it, or set training.spec = local"
        )
    flex = _takes_flex(training, engine=engine, on_gpu=on_gpu)
    fused_delta_rule = on_gpu and dtype in FUSED_TYPES and _installed("fla")
    return LayerChoice(engine, flex, dtype, replays=replays, fused_delta_rule=fused_delta_rule)


def _takes_flex(training: TrainingSection, *, engine: bool, on_gpu: bool) -> bool:
    layout = training.layout
    if training.dispatcher == "auto":
        spreads = layout.ep * layout.etp > 1 and training.dtype == "bfloat16"
        return engine and on_gpu and spreads and training.router_dtype == "fp32" and _installed("deep_ep")
    if training.dispatcher == "flex" and not _installed("deep_ep"):
        raise ConfigError(
            "training.dispatcher = flex needs DeepEP (deep_ep), which is not installed; set alltoall or auto"
        )
    return training.dispatcher == "flex"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
