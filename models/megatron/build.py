"""Build this rank's Megatron model chunks from a Hugging Face config.

Owns the chunks and the layout's part of Megatron's config; the layers' parts are in layer_specs.py. Does not
load weights, wrap for data parallelism or own an optimizer (mrl/training).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from mrl.config.sections.training import TrainingSection
from mrl.errors import CheckpointError
from mrl.models.families import family_of, require_trainable
from mrl.models.family import require_draft_head
from mrl.models.hf_config import HfConfig, field
from mrl.models.kernels.rotary import RotaryTable
from mrl.models.layout import Layout, chunk_layers, padded_vocab
from mrl.models.megatron.draft_head import DraftHead
from mrl.models.megatron.layer_choice import LayerChoice, choose_layers
from mrl.models.megatron.layer_specs import block_spec, layer_spec, norm_of
from mrl.models.megatron.lora_parameters import LowRankPair
from mrl.models.megatron.model_config import ModelConfig

ADAPTERS = "adapters."
"""Prefix of the names of adapters' parameters."""


class PackedModel(GPTModel):
    """A GPT model that returns final hidden states; log-probs are computed from them in chunks of tokens."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    @property
    def draft_head(self) -> DraftHead | None:
        """The last chunk's draft head, if it is trained."""
        head: Any = self._modules.get("drafts")
        return head

    @property
    def pairs(self) -> Iterable[LowRankPair]:
        """Adapters of a chunk with frozen weights (lora_parameters.py)."""
        adapters: Any = self._modules.get("adapters")
        return adapters or ()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Megatron's, without adapters (merged into the weights) and without float8 states: nothing is
        trained in float8, and only one of the two specs has them."""
        shards = super().sharded_state_dict(*args, **kwargs)
        return {
            name: shard
            for name, shard in shards.items()
            if not _is_extra_state(name) and not name.startswith(ADAPTERS)
        }

    def trained_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what a checkpoint saves: only the adapters if there are any, else sharded_state_dict()."""
        adapters = {name: shard for pair in self.pairs for name, shard in pair.sharded().items()}
        return adapters or self.sharded_state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:
        """Load as Megatron does; only float8 states may be missing."""
        result = super().load_state_dict(state_dict, strict=False, **kwargs)
        wrong = [name for names in result for name in names if not _is_extra_state(name)]
        if strict and wrong:
            raise CheckpointError(f"the loaded state has missing or unknown tensors: {wrong[:8]}")
        return result

    def values(self, hidden: Tensor) -> Tensor:
        """Return float32 values [m], or [m, K], of hidden states [m, D] from the value head."""
        return self.output_layer(hidden)

    def weights(self) -> dict[str, Tensor]:
        """Return an export's tensors by name: parameters without adapters, and routers' correction biases."""
        parameters = {name: p for name, p in self.named_parameters() if not name.startswith(ADAPTERS)}
        return parameters | self.correction_biases()

    def correction_biases(self) -> dict[str, Tensor]:
        """Return the float32 buffers that sigmoid routers add to scores before choosing, by name."""
        return {name: bias for name, bias in self.named_buffers() if name.endswith(".expert_bias")}

    def head_weight(self) -> Tensor:
        """Return [V / tp, D], this rank's rows of the output layer; the embedding if tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None
        return weight


def _is_extra_state(name: str) -> bool:
    return "_extra_state" in name.rpartition(".")[2]


class ValueHead(torch.nn.Module):
    """Linear map of hidden states to one number each, in float32, replicated over tp, initially 0."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [m] of hidden states [m, D]."""
        return torch.mv(hidden.float(), self.weight[0].float())


@dataclasses.dataclass
class ModelChunks:
    """This rank's part of the model."""

    models: list[PackedModel]
    config: TransformerConfig
    choice: LayerChoice
    rotary: RotaryTable
    vocab_size: int
    """Size without padding."""
    max_length: int
    has_value_head: bool = False
    """True if hidden states give values, not log-probs."""
    has_drafts: bool = False
    """True if the last stage trains a draft head."""

    @property
    def window(self) -> int:
        """Positions that windowed layers see; 0 if no layer has a window."""
        return self.config.window_size[0] + 1 if self.config.window_size else 0


def build_chunks(
    hf_config: HfConfig,
    training: TrainingSection,
    layout: Layout,
    *,
    max_length: int,
    device: torch.device,
    has_value_head: bool = False,
    replays: bool = False,
) -> ModelChunks:
    """Build this rank's model chunks with Megatron's own random initialisation.

    With `has_value_head` the output layer is a ValueHead, never tied to the embedding. With `replays` routers
    may be given the experts of each token (replay.py).
    """
    require_trainable(hf_config)
    family = family_of(hf_config)
    family.require_layout(hf_config, layout)
    has_drafts = training.drafts == "trained" and not has_value_head
    if has_drafts:
        require_draft_head(family, hf_config)
    choice = choose_layers(training, device, replays=replays, own_attention=family.needs_own_attention)
    config = _transformer_config(family.transformer_fields(hf_config), training, layout, device, choice)
    dtype = config.params_dtype
    vocab = field(hf_config, "vocab_size")
    place_pp = parallel_state.get_pipeline_model_parallel_rank()
    tied = bool(hf_config.get("tie_word_embeddings", False)) and not has_value_head
    models = []
    for chunk, layers in enumerate(chunk_layers(config.num_layers, layout, place_pp)):
        model = PackedModel(
            config,
            block_spec(config, layers, choice),
            vocab_size=padded_vocab(vocab, multiple=layout.tp),
            max_sequence_length=max_length,
            pre_process=place_pp == 0 and chunk == 0,
            post_process=place_pp == layout.pp - 1 and chunk == layout.vpp - 1,
            position_embedding_type="none",  # the packed attention applies the rotary embedding
            share_embeddings_and_output_weights=tied,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        if has_value_head and model.post_process:
            head: Any = ValueHead(config.hidden_size, dtype=dtype)
            model.output_layer = head
        if has_drafts and model.post_process:
            is_moe = family.is_moe_layer(hf_config, config.num_layers)
            spec = layer_spec(config, choice, is_moe=is_moe)
            model.add_module("drafts", DraftHead(config, spec, norm_of(choice)))
        models.append(model.to(device))
    mark_expert_parameters(models)
    if choice.transformer_engine and training.lora is None:  # adapters take the gradients of frozen weights
        fuse_gradient_accumulation(models)
    rotary = RotaryTable(
        family.rotary(hf_config),
        max_length=max_length + 2 * layout.cp * layout.tp,  # padding of segments and micro-batches
        dtype=dtype,
        device=device,
    )
    return ModelChunks(
        models=models,
        config=config,
        choice=choice,
        rotary=rotary,
        vocab_size=vocab,
        max_length=max_length,
        has_value_head=has_value_head,
        has_drafts=has_drafts,
    )


def mark_expert_parameters(models: list[PackedModel]) -> None:
    """Make Megatron reduce expert gradients over the expert-data-parallel group in every layout.

    By default it does so only with ep > 1. With ep = 1 and etp < tp it treats experts as dense parameters and
    would omit the tensor-parallel ranks, each of which sees other tokens. The same rule in every layout also
    gives the same two optimizers, so that a checkpoint can be resumed in another layout.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def fuse_gradient_accumulation(models: list[PackedModel]) -> None:
    """Let Transformer Engine's products add weight gradients to the float32 buffers themselves.

    Otherwise each layer makes a gradient in the weights' type, which is added afterwards. Megatron's setting
    (gradient_accumulation_fusion) does the same for these layers, but fails for the output layer without
    Apex.
    """
    modules: list[Any] = [module for model in models for module in model.modules()]
    for module in modules:
        if "fuse_wgrad_accumulation" in vars(module):
            module.fuse_wgrad_accumulation = True


def _transformer_config(
    fields: dict[str, Any],
    training: TrainingSection,
    layout: Layout,
    device: torch.device,
    choice: LayerChoice,
) -> TransformerConfig:
    dtype = getattr(torch, training.dtype)
    is_moe = "num_moe_experts" in fields
    if is_moe:
        fields = fields | _router_fields(training)
    if layout.pp > 1:
        fields = fields | _pipeline_fields(fields["num_layers"], layout)
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else ModelConfig
    return kind(
        **{"add_bias_linear": False} | fields,
        **_recompute_fields(training, is_moe=is_moe),
        **choice.fields(training, is_moe=is_moe),
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        cp_comm_type="p2p",  # for Transformer Engine's attention; our own gathers
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        variable_seq_lengths=layout.pp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # The loss is already divided by step-wide denominators: sum gradients over micro-batches and ranks.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,  # packed_attention.py rotates queries and keys
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _router_fields(training: TrainingSection) -> dict[str, Any]:
    return {
        "moe_router_dtype": training.router_dtype,
        "moe_router_load_balancing_type": "aux_loss" if training.router_aux_loss else "none",
        "moe_aux_loss_coeff": training.router_aux_loss,
    }


def _recompute_fields(training: TrainingSection, *, is_moe: bool) -> dict[str, Any]:
    if training.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if training.recompute == "off":
        return {}
    modules = ["core_attn", "moe" if is_moe else "mlp"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _pipeline_fields(num_layers: int, layout: Layout) -> dict[str, Any]:
    """Return an explicit layout if the layers do not divide into the (virtual) stages, as Megatron requires.

    With virtual stages and pp = 2, one batched exchange would carry two messages between the same two ranks
    and confuse them; the overlapped form sends each direction separately.
    """
    fields = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if layout.vpp > 1 else {}
    if num_layers % (layout.pp * layout.vpp) == 0:
        return fields
    by_rank = [chunk_layers(num_layers, layout, pp) for pp in range(layout.pp)]
    stages = [len(by_rank[pp][chunk]) for chunk in range(layout.vpp) for pp in range(layout.pp)]
    names = [["decoder"] * count for count in stages]
    names[0].insert(0, "embedding")
    names[-1].append("loss")
    return fields | {"pipeline_model_parallel_layout": PipelineParallelLayerLayout(names, layout.pp)}
