"""End-of-text tokens of a folder: the tokenizer's and generation_config.json's, else config.json's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError


def end_of_text(tokenizer: Any, model_path: str) -> tuple[int, ...]:
    """Return the ids, the tokenizer's first. Instruct models list two: one ends a turn, one a document."""
    folder = Path(model_path)
    ids = [tokenizer.eos_token_id, *_listed(folder / "generation_config.json")]
    if ids.count(None) == len(ids):
        ids = _listed(folder / "config.json")
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def require_can_end(rollout: RolloutSection, tokenizer: Any, size: int) -> None:
    """Raise ConfigError if a configured stop could never end a response of a model with `size` tokens."""
    if wrong := [i for i in rollout.stop_token_ids if not 0 <= i < size]:
        raise ConfigError(
            f"rollout.stop_token_ids: {wrong} are not tokens of the model, which are 0 to {size - 1}"
        )
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for text in rollout.stop:
        if specials := [special for special in added if special in text]:
            raise ConfigError(
                f"rollout.stop: {text!r} contains the special token {specials[0]!r}, which never appears in "
                f"a response's text and would never end one; set "
                f"rollout.stop_token_ids=[{added[specials[0]]}]"
            )


def _listed(path: Path) -> list[int | None]:
    """Return the file's `eos_token_id` as a list, [] without the file; ConfigError if it contains other
    types."""
    if not path.is_file():
        return []
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    if wrong := [i for i in ids if i is not None and type(i) is not int]:
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {wrong}")
    return ids
