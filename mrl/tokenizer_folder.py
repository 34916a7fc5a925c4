"""Load the tokenizer of a model's folder."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError

GENERIC = "TokenizersBackend"
CLASSES = {GENERIC: GENERIC, "PreTrainedTokenizerFast": GENERIC} | dict.fromkeys(
    ("Qwen2Tokenizer", "Qwen2TokenizerFast"), "Qwen2Tokenizer"
)
"""Class name in tokenizer_config.json -> transformers' class."""
_QWEN = frozenset({"qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"})
AUTO_CLASS_TYPES = {
    GENERIC: _QWEN
    | {"", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama", "minimax_m2", "mixtral", "olmoe"},
    "Qwen2Tokenizer": _QWEN | {"qwen2"},
}
"""Class -> model types ("": a folder without a model) for which AutoTokenizer uses the folder's class."""


def load_tokenizer(
    model_path: str, *, trust_remote_code: bool = False, date: datetime.date | None = None
) -> Any:
    """Return the tokenizer of the model's folder; raise ConfigError if transformers cannot load one.

    A tokenizer that is Python code of the folder only runs with `trust_remote_code`, and is refused
    otherwise: transformers would read the other files as another kind of tokenizer, with other ids.

    Args:
        date: Date that the chat template writes for today's (`strftime_now`).
    """
    code = "" if trust_remote_code else own_code(Path(model_path))
    if code and not (Path(model_path) / "tokenizer.json").is_file():
        raise ConfigError(
            f"the tokenizer in model.path = {model_path} is Python code of the folder, {code}: read it, then "
            "set model.trust_remote_code=true to run it"
        )
    try:
        tokenizer = from_folder(model_path, trust_remote_code=trust_remote_code)
        # A folder without tokenizer files gives an empty one of the family's class.
        reason = "" if tokenizer.encode("1", add_special_tokens=False) else "its vocabulary is empty"
    except Exception as error:  # whatever the readers of each kind of file raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason:
        raise ConfigError(
            f"model.path = {model_path} has no tokenizer that transformers can load ({reason}); put "
            "tokenizer.json and tokenizer_config.json next to config.json"
        )
    return tokenizer if date is None else writing_date(tokenizer, date)


def writing_date(tokenizer: Any, date: datetime.date) -> Any:
    """Make the tokenizer's chat template write `date` for today's, and return the tokenizer."""
    # A template's arguments hide the functions of the same name that transformers gives it.
    tokenizer.apply_chat_template = functools.partial(
        tokenizer.apply_chat_template, strftime_now=date.strftime
    )
    return tokenizer


def from_folder(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """Return AutoTokenizer's result; uses a known class directly, because AutoTokenizer imports torch."""
    folder = Path(model_path)
    fields = _fields(folder / "tokenizer_config.json")
    name = CLASSES.get(str(fields.get("tokenizer_class")), "")
    model_type = _fields(folder / "config.json").get("model_type", "")
    if (
        model_type in AUTO_CLASS_TYPES.get(name, ())
        and "auto_map" not in fields
        and (folder / "tokenizer.json").is_file()
    ):
        import transformers

        return getattr(transformers, name).from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def _fields(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; empty if unreadable, because transformers reports what is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def own_code(folder: Path) -> str:
    """Return the file of Python code that is the folder's tokenizer; empty if it has a usual one."""
    auto_map = _fields(folder / "tokenizer_config.json").get("auto_map", [])
    classes = auto_map.get("AutoTokenizer", []) if isinstance(auto_map, dict) else auto_map
    references = [classes] if isinstance(classes, str) else [name for name in classes if name]
    return f"{references[0].rpartition('.')[0]}.py" if references else ""
