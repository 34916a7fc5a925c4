"""A small random model in Hugging Face format, made where a configuration says `model.new`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.errors import ConfigError
from mrl.prepare import tokenizer
from mrl.prepare.new_model import hf_config


def ensure(model: ModelSection, training_files: Sequence[str], *, seed: int) -> None:
    """Makes the model's folder when it is absent and `model.new` says what to make; else it must exist."""
    path = Path(model.path)
    if (path / "config.json").is_file():
        return
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"model.path = {path} exists but holds no config.json; it is no model folder")
    if model.new is None:
        raise ConfigError(
            f"model.path = {path} does not exist; give a Hugging Face folder, or say what to make in model.new"
        )
    make(
        model.new,
        model.new.tokenizer_files or tuple(training_files),
        path,
        max_length=model.max_length,
        seed=seed,
    )


def make(new: NewModelSection, files: Sequence[str], folder: Path, *, max_length: int, seed: int) -> None:
    """Tokenizer from the files, then random weights of normal distribution with deviation 0.02 (the family's own start)."""
    if new.tokenizer == "bpe":
        vocab_size = tokenizer.write_bpe(files, folder, vocab_size=new.vocab_size)
    else:
        vocab_size = tokenizer.write_characters(files, folder)
    _weights(new, vocab_size, max_length, seed).save_pretrained(str(folder))


def _weights(new: NewModelSection, vocab_size: int, max_length: int, seed: int):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a bar for one small file
    fields = hf_config(new, vocab_size=vocab_size, max_length=max_length)
    config = transformers.AutoConfig.for_model(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    # Told after the weights are drawn: a padding row of zeros would be blown up by the first norm (its gradient is
    # 1 / sqrt(eps) times larger) whenever the model says the padding token, and gradient clipping would waste that step.
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, new.dtype))
