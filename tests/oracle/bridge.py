"""Megatron-Bridge on one rank: a folder's model, its tensors and its export; in the oracle's process only."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from safetensors.torch import load_file

from mrl.models.layout import Layout
from tests.oracle.rows import Held, held
from tests.tiny_models import reference_model


class KimiK2(transformers.DeepseekV3Config):
    """The config whose class is in Kimi-K2's folder; its keys are DeepSeek-V3's."""

    model_type = "kimi_k2"


class PlainQueries(MLASelfAttention):
    """Latent attention without Megatron-core 0.19.2's norm of uncompressed queries (Moonlight has none)."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        result = super()._resolve_qk_norm_config(submodules)
        return result | ({} if self.config.q_lora_rank else {"linear_q_proj": submodules.linear_q_proj})


gpt_layer_specs.MLASelfAttention = PlainQueries  # type: ignore[misc]
transformers.AutoConfig.register("kimi_k2", KimiK2)
logging.disable(logging.WARNING)


@contextlib.contextmanager
def place(layout: Layout, rank: int, meeting: Path) -> Iterator[None]:
    """Enter one rank of a layout over gloo; ranks meet in a file."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp
    )
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclasses.dataclass
class Converted:
    """A folder as the bridge's Megatron model on this rank."""

    folder: Path
    bridge: Any
    provider: Any
    model: Any

    @classmethod
    def of(cls, folder: Path, layout: Layout) -> Converted:
        """Convert a folder in float32; the provider's settings say where it runs, not what the model is."""
        bridge: Any = AutoBridge.from_hf_pretrained(str(folder))
        provider = bridge.to_megatron_provider(load_weights=False)
        run_here(provider, layout)
        model = provider.provide(
            parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        )
        bridge.load_hf_weights([model])
        return cls(folder, bridge, provider, model.eval())

    def held(self) -> dict[str, Held]:
        """Return shape and digest of parameters and routers' correction biases, by Megatron's names."""
        tensors = dict(self.model.named_parameters())
        tensors |= {name: bias for name, bias in self.model.named_buffers() if name.endswith(".expert_bias")}
        return {name: held(value) for name, value in tensors.items()}

    def lost(self) -> list[str]:
        """Return the folder's tensors that the bridge does not export bitwise, and those that it adds."""
        before = load_file(self.folder / "model.safetensors")
        exported = self.bridge.export_hf_weights([self.model], cpu=True, show_progress=False)
        after = {item.param_name: item.weight for item in exported}
        return sorted(
            name
            for name in before.keys() | after.keys()
            if name not in before or name not in after or not torch.equal(before[name], after[name])
        )

    def gap(self, tokens: torch.Tensor) -> float:
        """Return the largest difference of log-probs [n, V] between Megatron's model and transformers'."""
        reference = transformers_model(self.folder)
        with torch.no_grad():
            expected = reference(tokens[None]).logits[0].double().log_softmax(-1)
            positions = torch.arange(len(tokens))[None]
            logits = self.model(tokens[None], positions, attention_mask=None)[0]
        logprobs = logits[:, : expected.shape[-1]].double().log_softmax(-1)
        return (logprobs - expected).abs().max().item()


def transformers_model(folder: Path) -> Any:
    """Return transformers' model, from its constructor: from_pretrained() leaves rotary tables empty here."""
    loaded = reference_model(folder)
    model = type(loaded)(loaded.config).float().eval()
    model.load_state_dict(loaded.state_dict())
    return model


def run_here(provider: Any, layout: Layout) -> None:
    """Set layout, float32, no fusion, forms that need no GPU, and no multi-token prediction."""
    float32 = torch.float32
    provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = layout.tp, layout.pp
    provider.expert_model_parallel_size, provider.expert_tensor_parallel_size = layout.ep, layout.etp
    provider.sequence_parallel = layout.tp > 1
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = float32
    provider.bf16 = provider.fp16 = False
    provider.use_cpu_initialization, provider.perform_initialization = True, False
    provider.deterministic_mode = True  # delta nets in torch
    provider.mtp_num_layers = None
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 1
    for fusion in (
        "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion",
        "bias_activation_fusion", "apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion",
        "cross_entropy_loss_fusion", "moe_shared_expert_overlap",
    ):  # fmt: skip
        setattr(provider, fusion, False)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
