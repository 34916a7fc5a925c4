"""Make the random model that `model.new` describes, in Hugging Face format, if its folder is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.errors import ConfigError
from mrl.files import share_weights
from mrl.prepare import tokenizer


def ensure_model(model: ModelSection, training_files: Sequence[str], *, seed: int) -> None:
    """Make the model's folder if it is missing and `model.new` is set; else it must be a model folder."""
    path = Path(model.path)
    if (path / "config.json").is_file():
        return
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"model.path = {path} is not a model folder: it contains no config.json")
    if model.new is None:
        raise ConfigError(
            f"model.path = {path} does not exist; use a Hugging Face folder, or set model.new to make one"
        )
    make_new_model(model.new, training_files, path, max_length=model.max_length, seed=seed)


def make_new_model(
    new: NewModelSection, files: Sequence[str], folder: Path, *, max_length: int, seed: int
) -> None:
    """Train a tokenizer on the files and draw random weights (normal, deviation 0.02: the family's init)."""
    vocab_size = write_tokenizer(new, files, folder)
    _weights(new, vocab_size, max_length, seed).save_pretrained(str(folder))
    share_weights(folder)


def write_tokenizer(new: NewModelSection, training_files: Sequence[str], folder: str | Path) -> int:
    """Write the tokenizer, from its own files or the training data; return the vocabulary's size."""
    files = new.tokenizer_files or tuple(training_files)
    if new.tokenizer == "bpe":
        return tokenizer.write_bpe(files, folder, vocab_size=new.vocab_size)
    write = tokenizer.write_chat if new.tokenizer == "chat" else tokenizer.write_characters
    return write(files, folder)


def _weights(new: NewModelSection, vocab_size: int, max_length: int, seed: int):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a bar for one small file
    config = _described(new, vocab_size, max_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    # Set after the weights are drawn, so that the padding row is not zeros: the first norm multiplies the
    # gradient of a zero row by 1 / sqrt(eps) whenever the model samples the padding token, and gradient
    # clipping would waste that step.
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, new.dtype))


def hf_config(new: NewModelSection, *, vocab_size: int, max_length: int) -> dict[str, Any]:
    """Return the new model's config.json; planning reads it before the folder exists."""
    return json.loads(_described(new, vocab_size, max_length).to_json_string())


def _described(new: NewModelSection, vocab_size: int, max_length: int):
    """Return the transformers config, which fills in the family's defaults (a rotary embedding's base); the
    vocabulary is rounded up to a multiple of 16."""
    import transformers

    fields = {
        "model_type": new.family,
        "vocab_size": -(-vocab_size // 16) * 16,  # divides by any small tensor-parallel size
        "hidden_size": new.hidden_size,
        "intermediate_size": new.expert_size * new.num_experts_per_token,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "head_dim": new.head_dim,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if new.family == "qwen3_moe":
        fields |= {
            "num_experts": new.num_experts,
            "num_experts_per_tok": new.num_experts_per_token,
            "moe_intermediate_size": new.expert_size,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        }
    return transformers.AutoConfig.for_model(**fields)
