"""The tokens that end a response of a model folder: its tokenizer's end-of-text, and what generation_config.json lists; that of
config.json if neither names one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError


def end_of_text(tokenizer: Any, model_path: str) -> tuple[int, ...]:
    """The ids, the tokenizer's first. Instruct models end a turn on another token than a document, and list both."""
    folder = Path(model_path)
    ids = [tokenizer.eos_token_id, *_listed(folder / "generation_config.json")]
    if ids.count(None) == len(ids):
        ids = _listed(folder / "config.json")
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def require_can_end(rollout: RolloutSection, tokenizer: Any, size: int) -> None:
    """ConfigError where a stop of the configuration could never end a response of a model with `size` tokens."""
    if wrong := [i for i in rollout.stop_token_ids if not 0 <= i < size]:
        raise ConfigError(f"rollout.stop_token_ids: {wrong}; the model's tokens are 0 to {size - 1}")
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for text in rollout.stop:
        if held := [special for special in added if special in text]:
            raise ConfigError(
                f"rollout.stop: {text!r} holds the special token {held[0]!r}, which is no part of a response's text and would "
                f"never end one; rollout.stop_token_ids=[{added[held[0]]}] does"
            )


def _listed(path: Path) -> list[int | None]:
    """Its `eos_token_id`, one id or a list of them; empty without the file. ConfigError where it is something else."""
    if not path.is_file():
        return []
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    if wrong := [i for i in ids if i is not None and type(i) is not int]:
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {wrong}")
    return ids
