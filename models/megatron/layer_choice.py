"""Choose the layers of a trainer rank: Transformer Engine's on GPUs, our own and Megatron's elsewhere.

The choice is made once, from configuration, device and installed packages; all other code reads it.
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
"""Types that Transformer Engine's kernels for packed attention support."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerChoice:
    """Layers of all model chunks of a rank."""

    transformer_engine: bool
    """Use Transformer Engine's layers with their fusions, including grouped expert products."""
    flex: bool = False
    """Dispatch tokens to experts with DeepEP's kernels, otherwise by all-to-all."""
    dtype: torch.dtype = torch.bfloat16
    """Type of parameters and products."""
    replays: bool = False
    """True if routers may be given tokens' experts; Transformer Engine's fused routing cannot."""
    fused_delta_rule: bool = False
    """Compute delta nets' rule with flash-linear-attention's kernels, otherwise in torch."""

    @property
    def spec(self) -> Spec:
        """Naming of the parameters."""
        return TRANSFORMER_ENGINE if self.transformer_engine else TRAINER

    @property
    def fused_attention(self) -> bool:
        """True if Transformer Engine's attention is used. In float32 our own is, because no fused kernel
        supports packed segments in that type."""
        return self.transformer_engine and self.dtype in FUSED_TYPES

    def fields(self, training: TrainingSection, *, is_moe: bool) -> dict[str, Any]:
        """Return Megatron's settings for this choice: its fusions and the token dispatch.

        Transformer Engine's products sum weight gradients into the float32 buffers themselves (build.py).
        Megatron's setting for that would also require Apex, for the output layer.
        """
        fields: dict[str, Any] = {
            # also for dense models: Megatron refuses the default dispatcher with uneven lengths
            "moe_token_dispatcher_type": "flex" if self.flex else "alltoall",
            "bias_activation_fusion": self.transformer_engine,
        }
        if self.flex:
            fields["moe_flex_dispatcher_backend"] = "deepep"
        if is_moe:
            fields |= {
                "moe_grouped_gemm": self.transformer_engine,
                "moe_permute_fusion": self.transformer_engine,
                # fused routing is float32 only
                "moe_router_fusion": self.transformer_engine
                and training.router_dtype == "fp32"
                and not self.replays,
            }
        return fields


def choose_layers(
    training: TrainingSection, device: torch.device, *, replays: bool = False, own_attention: bool = False
) -> LayerChoice:
    """Choose layers from training.spec, dispatcher and delta_net_kernels; "auto", which a run's start
    replaces (mrl/capacity/auto_settings.py), decides by device, environment and model
    (Family.needs_own_attention).

    Raises ConfigError if a requested package is not installed, or if settings are incompatible.
    """
    wanted, dtype = training.spec, getattr(torch, training.dtype)
    on_gpu = device.type == "cuda"
    engine = wanted == "transformer_engine"
    if wanted == "auto":
        engine = _installed("transformer_engine") and on_gpu and not own_attention
    elif engine and own_attention:
        raise ConfigError(
            "training.spec = transformer_engine does not support attention sinks, which only our own "
            "attention implements; set local or auto"
        )
    if engine and not _installed("transformer_engine"):
        raise ConfigError(
            "training.spec = transformer_engine needs the package transformer_engine, which is not installed "
            "for the trainer; install it, or set training.spec = local"
        )
    flex = _takes_flex(training, engine=engine, on_gpu=on_gpu)
    rule = _fuses_delta_rule(training, on_gpu=on_gpu)
    return LayerChoice(engine, flex, dtype, replays=replays, fused_delta_rule=rule)


def _fuses_delta_rule(training: TrainingSection, *, on_gpu: bool) -> bool:
    can = on_gpu and getattr(torch, training.dtype) in FUSED_TYPES
    if training.delta_net_kernels == "fla" and not (can and _installed("fla")):
        raise ConfigError(
            "training.delta_net_kernels = fla needs a GPU, training.dtype = bfloat16 and the package "
            "flash-linear-attention; set torch or auto"
        )
    return training.delta_net_kernels != "torch" and can and _installed("fla")


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
