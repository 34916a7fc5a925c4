"""Read what families read alike from a Hugging Face folder's config.json, in its several spellings.

This module imports no engine. rope.py reads the rotary embedding; keys of one family are read in its file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.models import int4
from mrl.models.tensors import BLOCK

HfConfig = Mapping[str, Any]

QUANTIZATION = "quantization_config"
"""Key of the quantisation of a folder's linear weights."""

FP8 = "fp8"
"""Method of DeepSeek-V3's and Qwen3's FP8 folders: float8_e4m3fn values in `X.weight`, the scale of each
block in `X.weight_scale_inv`; weight = value * scale."""
MXFP4 = "mxfp4"
"""Method of gpt-oss's folders (models/mxfp4.py)."""
COMPRESSED = "compressed-tensors"
"""Method of Kimi-K2-Thinking's folders (models/int4.py)."""

E4M3 = ("e4m3", "float8_e4m3fn")
"""Names that published folders give to the type of their values."""

HARMLESS = frozenset({
    # identity of the folder
    "model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "dtype",
    "torch_dtype", "tokenizer_class", "name_or_path", "unsloth_version", "unsloth_fixed",
    # tokens and lengths: the tokenizer, rollout.* and model.max_length decide
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "max_position_embeddings", "model_max_length", "max_length",
    # what transformers returns and caches
    "use_cache", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states",
    "output_router_logits", "torchscript", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "experts_implementation",
    # sampling, which transformers 4 writes into `text_config`: rollout.* decides
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "min_length", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "length_penalty", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "tf_legacy_loss", "use_bfloat16",
    # pre-training; auxiliary losses are set by training.router_aux_loss
    "initializer_range", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
})  # fmt: skip
"""Keys that do not affect training or serving, whatever their value."""

UNUSED_IN_PASSES = (HARMLESS - {"model_type"}) | {"attention_dropout", "quantization_config"}
"""Keys of config.json that no forward pass reads."""


_TIED_BY_DEFAULT = ("smollm3",)
"""Model types whose config.json may omit `tie_word_embeddings` if it is true."""


def different_values(first: HfConfig, second: HfConfig) -> list[str]:
    """Return the keys of config.json that passes read and in which two models differ."""
    names = sorted((first.keys() | second.keys()) - UNUSED_IN_PASSES)
    return [name for name in names if first.get(name) != second.get(name)]


def language_model(hf: HfConfig) -> dict[str, Any]:
    """Return the text model's config: a multimodal folder's `text_config` is merged into the top level, which
    decides on the model type and on tied embeddings, as in transformers."""
    top = {key: value for key, value in hf.items() if key != "text_config"}
    decided = {key: hf[key] for key in ("model_type", "tie_word_embeddings") if key in hf}
    tied = {"tie_word_embeddings": True} if hf.get("model_type") in _TIED_BY_DEFAULT else {}
    return tied | top | dict(hf.get("text_config") or {}) | decided


class RecordingConfig(Mapping[str, Any]):
    """A config.json that records which of its keys are read."""

    def __init__(self, hf: HfConfig) -> None:
        self._hf = hf
        self.read_keys: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        return self._hf[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hf)

    def __len__(self) -> int:
        return len(self._hf)


def field(hf: HfConfig, *names: str) -> Any:
    """Return the first of `names` that the config has; transformers versions spell some keys differently."""
    values = [value for name in names if (value := hf.get(name)) is not None]
    if not values:
        raise ConfigError(
            f"config.json of a {hf.get('model_type')} model has none of {list(names)}; complete the file"
        )
    return values[0]


def head_dim(hf: HfConfig) -> int:
    """Return the width of one attention head."""
    return hf.get("head_dim") or field(hf, "hidden_size") // field(hf, "num_attention_heads")


def checkpoint_dtype(hf: HfConfig) -> str:
    """Return the folder's dtype by torch name; bfloat16 if the config does not set it."""
    return str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def stored_method(hf: HfConfig) -> str:
    """Return the quantisation method of a folder's weights; "" if they are not quantised."""
    return (hf.get(QUANTIZATION) or {}).get("quant_method", "")


def unsupported_values(
    hf: HfConfig, allowed: Mapping[str, tuple[Any, ...]], methods: Collection[str]
) -> list[str]:
    """List as text the keys whose value is not `allowed`, and a quantisation by none of `methods`.

    No family implements an activation other than SiLU, or attention dropout. A family decides on attention
    biases.
    """
    allowed = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "attention_dropout": (None, 0),
    } | dict(allowed)
    problems = [
        f"{key} = {hf.get(key)!r} (supported: {', '.join(map(repr, values))})"
        for key, values in allowed.items()
        if hf.get(key) not in values
    ]
    settings = hf.get(QUANTIZATION)
    if settings and not (stored_method(hf) in methods and _is_read(settings)):
        keys = ("quant_method", "weight_block_size", "fmt", "format", "config_groups", "kv_cache_scheme")
        shown = {key: settings[key] for key in keys if key in settings}
        supported = ", ".join([*(_READ[method] for method in methods), "a copy in bfloat16"])
        problems.append(f"{QUANTIZATION} = {shown!r} (supported: {supported})")
    return problems


_READ = {
    FP8: f"fp8 e4m3 in blocks of {BLOCK} x {BLOCK}",
    COMPRESSED: f"pack-quantized int4 in groups of {int4.GROUP}",
    MXFP4: "mxfp4",
}
"""Method -> the form of it that is supported."""


def _is_read(settings: Mapping[str, Any]) -> bool:
    """Return True if a quantisation by a known method has the supported form."""
    method = settings["quant_method"]
    if method == COMPRESSED:
        return int4.is_supported(settings)
    return method == MXFP4 or (
        settings.get("weight_block_size") == [BLOCK, BLOCK] and settings.get("fmt", "e4m3") in E4M3
    )
