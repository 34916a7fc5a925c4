"""The name tables against real Megatron models: every rank of several layouts, names and shapes equal to the last one.

One process builds each rank's model in turn: torch's own stand-in process group gives Megatron a world of any size, and a
model's construction moves no data between ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.names import LOCAL
from mrl.errors import ReshardError
from resharding import sources
from resharding.layout import Layout, Place

pytestmark = pytest.mark.engine

COMMON = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
}
QWEN3 = COMMON | {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN3_MOE = COMMON | {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 8,
    "moe_intermediate_size": 32, "mlp_only_layers": [1],
}  # fmt: skip
MIXTRAL = COMMON | {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
}
DEEPSEEK = COMMON | {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "num_key_value_heads": 4, "n_routed_experts": 8,
    "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
DEEPSEEK_NO_Q_LORA = DEEPSEEK | {"q_lora_rank": None}


def megatron_config(hf: dict, layout: Layout):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts")
    latent = hf["model_type"] == "deepseek_v3"
    moe = {
        "num_moe_experts": experts, "moe_ffn_hidden_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp, "moe_layer_freq": moe_pattern(hf),
    } if experts else {}  # fmt: skip
    if latent:
        moe |= {
            "q_lora_rank": hf["q_lora_rank"], "kv_lora_rank": hf["kv_lora_rank"], "qk_head_dim": hf["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": hf["qk_rope_head_dim"], "v_head_dim": hf["v_head_dim"], "rope_type": "rope",
            "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
            "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        }  # fmt: skip
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], kv_channels=hf["head_dim"],
        num_attention_heads=hf["num_attention_heads"], num_query_groups=hf["num_key_value_heads"],
        ffn_hidden_size=hf["intermediate_size"], use_cpu_initialization=True, perform_initialization=False,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None, sequence_parallel=layout.tp > 1,
        pipeline_dtype=torch.float32, params_dtype=torch.float32, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        qk_layernorm=hf["model_type"] != "mixtral", bias_activation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, moe_permute_fusion=False, **moe,
    )  # fmt: skip


def moe_pattern(hf: dict) -> list[int]:
    dense = set(hf.get("mlp_only_layers", [])) | set(range(hf.get("first_k_dense_replace", 0)))
    return [int(layer not in dense) for layer in range(hf["num_hidden_layers"])]


class Norm(torch.nn.Module):
    """Megatron's torch norm refuses sequence parallelism at construction; only the weight's name and size matter here."""

    def __init__(self, config, hidden_size, eps=1e-6, **kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))


class CoreAttention(torch.nn.Module):
    """Has no parameters; Megatron's own for machines without Transformer Engine does not take latent attention's widths."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def make_constructible(spec) -> None:
    """Put in what has the same parameters and can be built without Transformer Engine."""
    parts = spec.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if isinstance(getattr(attention, name, None), type) and "Norm" in getattr(attention, name).__name__:
            setattr(attention, name, Norm)


def build_rank(hf: dict, layout: Layout, place: Place, vocab: int):
    """The model chunks of one rank, as Megatron builds them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp, create_gloo_process_groups=False,
    )  # fmt: skip
    try:
        assert (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        ) == (place.tp, place.pp, place.ep, place.etp, place.edp)
        config = megatron_config(hf, layout)
        chunks = []
        for chunk in range(layout.vpp):
            stage = chunk if layout.vpp > 1 else None
            block = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
            )
            for spec in block.layer_specs:
                make_constructible(spec)
            block.layer_norm = Norm
            chunks.append(GPTModel(
                config, block, vocab_size=vocab, max_sequence_length=64, position_embedding_type="rope", vp_stage=stage,
                pre_process=place.pp == 0 and chunk == 0,
                post_process=place.pp == layout.pp - 1 and chunk == layout.vpp - 1,
                share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
            ))  # fmt: skip
        return chunks
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def cpu_construction(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    from megatron.core.transformer import multi_latent_attention

    for name in (
        "TELinear",
        "TEColumnParallelLinear",
        "Linear",
    ):  # no types without Transformer Engine
        if not isinstance(getattr(multi_latent_attention, name), type):
            monkeypatch.setattr(multi_latent_attention, name, type(name, (), {}))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)


LAYOUTS = [
    (QWEN3, Layout()),
    (QWEN3, Layout(tp=4, pp=2)),  # tp above the query groups, tied copy on the last stage
    (QWEN3_MOE, Layout(tp=2, pp=2, ep=2, vpp=2)),
    (QWEN3_MOE, Layout(tp=4, ep=2, etp=2, dp=2)),
    (QWEN3_MOE, Layout(tp=1, ep=4, dp=4)),
    (MIXTRAL, Layout(tp=2, ep=2, pp=2)),
    (DEEPSEEK, Layout(tp=2, pp=2, ep=4, dp=2)),
    (DEEPSEEK_NO_Q_LORA, Layout(tp=2, ep=2)),
]


@pytest.mark.parametrize(("hf", "layout"), LAYOUTS)
def test_names_shapes_and_coordinates_equal_megatrons(hf, layout):
    tables = sources.from_layout(hf, layout, pad_vocab_to=4, dtype="float32")
    vocab = -(-hf["vocab_size"] // (4 * layout.tp)) * 4 * layout.tp
    for place in layout.places():
        chunks = [live_tensors(model) for model in build_rank(hf, layout, place, vocab)]
        manifest = sources.from_model(chunks, hf, layout, place, spec=LOCAL, pad_vocab_to=4)
        assert manifest == tables[place.rank]


def live_tensors(model) -> dict:
    return dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n.endswith("expert_bias")
    }


def test_a_model_that_differs_is_refused_by_parameter_name():
    layout = Layout(tp=2)
    chunks = [live_tensors(model) for model in build_rank(QWEN3_MOE, layout, layout.place(0), 256)]
    chunks[0]["decoder.layers.0.mlp.stranger.weight"] = chunks[0].pop("decoder.layers.0.mlp.router.weight")
    with pytest.raises(
        ReshardError, match=r"stranger\.weight is not in the name table.*router\.weight is missing"
    ):
        sources.from_model(chunks, QWEN3_MOE, layout, layout.place(0), pad_vocab_to=4)
