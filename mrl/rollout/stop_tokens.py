"""The tokens that end a response of a model folder: its tokenizer's end-of-text, and what generation_config.json lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError


def end_of_text(tokenizer: Any, model_path: str) -> tuple[int, ...]:
    """The ids, the tokenizer's first. Instruct models end a turn on another token than a document, and list both."""
    ids = [tokenizer.eos_token_id, *_generation_config(Path(model_path) / "generation_config.json")]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _generation_config(path: Path) -> list[int | None]:
    """Its `eos_token_id`, one id or a list of them; empty without the file. ConfigError where it is something else."""
    if not path.is_file():
        return []
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    if wrong := [i for i in ids if i is not None and type(i) is not int]:
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {wrong}")
    return ids
