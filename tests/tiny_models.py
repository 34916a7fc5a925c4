"""Random tiny checkpoints in Hugging Face format, and packed batches for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.samples import TrainBatch
from tests.support.image_folders import config_beside_images, pack_experts, publish_names, turn_experts

VOCAB = 131
"""Odd, so that any tensor-parallel layout pads the vocabulary."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,  # with the rotary part 576: the one width that vLLM's latent attention on CPU knows
    "qk_rope_head_dim": 64,
    "head_dim": 64,  # as transformers calls it
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
GROWING: dict[str, Any] = YARN | {
    "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
"""Queries grow from position 8 on, so in most of the sequences of tests."""
MINIMAX: dict[str, Any] = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8, "num_mtp_modules": 0,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}
GLM: dict[str, Any] = {
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
QWEN35_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": None,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 96}
SECTIONS = DELTA_NET | {
    "rope_parameters": DELTA_NET["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
}
MROPE = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | SHARED | {"norm_topk_prob": False}),
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "llama_tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", {"rope_parameters": GROWING}),
    "mistral3": ("Mistral3", {"model_type": "ministral3", "rope_parameters": GROWING}),
    "seed_oss": ("SeedOss", {}),
    "smollm3": (
        "SmolLM3",
        {"tie_word_embeddings": True, "pad_token_id": None, "no_rope_layers": [1, 0, 1, 0]},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": PLAIN | MROPE, "tie_word_embeddings": True}),
    "qwen3_vl_moe": ("Qwen3VLMoe", EXPERTS | {"rope_parameters": PLAIN | MROPE}),
    "qwen3_moe_yarn": ("Qwen3Moe", EXPERTS | {"rope_parameters": YARN}),
    "qwen3_next": ("Qwen3Next", EXPERTS | SHARED | DELTA_NET),
    "qwen3_next_yarn": (
        "Qwen3Next",
        EXPERTS | SHARED | DELTA_NET | {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
    ),
    "qwen3_5": ("Qwen3_5", SECTIONS | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN35_EXPERTS | SHARED | SECTIONS),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "olmoe": ("Olmoe", {"hidden_size": 128, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2", MINIMAX),
    "gpt_oss": ("GptOss", GPT_OSS),
    "phi3": ("Phi3", {"pad_token_id": None, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    "kimi_k2": ("DeepseekV3", LATENT | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "kimi_k25": ("Kimi_K25", LATENT | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "moonlight": (
        "DeepseekV3",
        LATENT | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_parameters": PLAIN},
    ),
    "glm4_moe": ("Glm4Moe", GLM),
    # transformers' norms inside latent attention ignore rms_norm_eps and use 1e-6; vLLM's and ours use it
    "glm4_moe_lite": (
        "Glm4MoeLite",
        LATENT | {"n_group": 1, "topk_group": 1, "rope_parameters": PLAIN, "rms_norm_eps": 1e-6},
    ),
}
"""Model type or form -> prefix of transformers' classes, and fields in addition to COMMON.

tests/mrl/training/test_family_matrix.py tests each."""
BESIDE_IMAGES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "mistral3", "kimi_k25")
"""Families whose folders are as published, with an image model."""
SERVED: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
"""Widths that vLLM's CPU kernels accept for every family, unless its own fields differ."""


def tiny_config(model_type: str, *, served: bool = False, **changes: Any) -> Any:
    """Return transformers' config of a tiny model. `served`: with widths that vLLM's CPU kernels accept."""
    import transformers

    fields = {"num_hidden_layers": 4, "tie_word_embeddings": False, "initializer_range": 0.1} | COMMON
    prefix, specific = FAMILIES[model_type]
    fields |= (SERVED if served else {}) | specific | changes
    if model_type in BESIDE_IMAGES:
        return config_beside_images(prefix, fields)
    return getattr(transformers, f"{prefix}Config")(**fields)


def write_model(
    folder: Path,
    model_type: str = "qwen3_moe",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    served: bool = False,
    **changes: Any,
) -> Path:
    """Write a random model of `tiny_config` with a larger spread than usual, so that errors show."""
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(model_type, served=served, **changes)
    kind = "ForConditionalGeneration" if model_type in BESIDE_IMAGES else "ForCausalLM"
    model: Any = getattr(transformers, FAMILIES[model_type][0] + kind)(config)
    model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # float32 in folders of any type
                buffer.data = 0.1 * torch.randn(buffer.shape)
    model.save_pretrained(folder)
    if model_type == "qwen3_5_moe":
        pack_experts(folder)
    if model_type == "qwen3_vl_moe":
        turn_experts(folder)
    if model_type == "kimi_k25":
        publish_names(folder)
    if model_type == "kimi_k2":  # of which transformers knows the classes alone
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    return folder


def random_batch(
    num_samples: int = 12, *, seed: int = 0, longest: int = 24, vocab: int = VOCAB
) -> TrainBatch:
    """Return samples of uneven length whose second halves are trained."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, longest + 1, num_samples)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu_seqlens[-1])
    inside = np.arange(total) - np.repeat(cu_seqlens[:-1], lengths)
    return TrainBatch(
        tokens=rng.integers(0, vocab, total).astype(np.int32),
        cu_seqlens=cu_seqlens,
        loss_mask=inside >= np.repeat(lengths // 2, lengths).clip(min=1),
        group_ids=np.arange(num_samples) // 4,
        sample_ids=tuple(f"{i}.0" for i in range(num_samples)),
        arrays={"advantages": rng.normal(size=total).astype(np.float32)},
    )


def batch_of_tokens(sequences: Sequence[Sequence[int]]) -> TrainBatch:
    """Return a batch with one fully predicted sample per sequence."""
    lengths = [len(tokens) for tokens in sequences]
    return TrainBatch(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in sequences]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=np.ones(sum(lengths), np.bool_),
        group_ids=np.arange(len(lengths)),
        sample_ids=tuple(f"{i}.0" for i in range(len(lengths))),
        arrays={},
    )


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' model of a folder, by class, because it does not know every model_type."""
    import transformers

    hf = json.loads((folder / "config.json").read_text())
    kind: Any = getattr(transformers, hf["architectures"][0])
    config = kind.config_class.from_dict(hf | {"model_type": kind.config_class.model_type})
    model = kind.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager")
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"  # grouped products have no float64
    return model


def reference_logprobs(
    folder: Path, batch: TrainBatch, *, temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probs, entropy) [N] by transformers in `dtype`, one segment at a time, over the batch's
    sampling masks."""
    model = reference_model(folder, dtype)
    logprobs, entropy = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].double() / temperature
        if batch.sampling_masks is not None:
            masks = batch.sampling_masks.part(int(start) + 1, int(end))
            for row, kept in zip(logits, np.split(masks.tokens, masks.bounds()[1:-1]), strict=True):
                left_out = np.setdiff1d(np.arange(len(row)), kept) if len(kept) else np.zeros(0, np.int64)
                row[torch.from_numpy(left_out)] = -torch.inf
        log_p = logits.log_softmax(-1)
        logprobs[start + 1 : end] = log_p.gather(1, tokens[0, 1:, None])[:, 0]
        entropy[start + 1 : end] = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)
    return logprobs, entropy
