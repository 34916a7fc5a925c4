"""The tokenizer of a model's folder."""

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
"""What tokenizer_config.json says -> transformers' class."""
_QWEN = frozenset({"qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"})
AS_SAID = {
    GENERIC: _QWEN
    | {"", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama", "minimax_m2", "mixtral", "olmoe"},
    "Qwen2Tokenizer": _QWEN | {"qwen2"},
}
"""Class -> the model types (none: a folder without a model) whose folders AutoTokenizer reads with the class that they name."""


def load_tokenizer(
    model_path: str, *, trust_remote_code: bool = False, date: datetime.date | None = None
) -> Any:
    """The tokenizer of the model's folder; ConfigError where there is none that transformers loads.

    `date`: what its chat template writes where it asks for today's (`strftime_now`).

    One that is Python code of the folder is run with `trust_remote_code`, and refused without: transformers
    would read the files beside it as another kind of tokenizer, which gives other ids.
    """
    code = "" if trust_remote_code else own_code(Path(model_path))
    if code and not (Path(model_path) / "tokenizer.json").is_file():
        raise ConfigError(
            f"the tokenizer in model.path = {model_path} is Python code of the folder, {code}: read it, and set "
            "model.trust_remote_code=true to have it run"
        )
    try:
        tokenizer = from_folder(model_path, trust_remote_code=trust_remote_code)
        # A folder without a tokenizer's files gives an empty one of the family's class.
        reason = "" if tokenizer.encode("1", add_special_tokens=False) else "its vocabulary is empty"
    except Exception as error:  # what the readers of each kind of file raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason:
        raise ConfigError(
            f"model.path = {model_path} holds no tokenizer that transformers loads ({reason}); put tokenizer.json and "
            "tokenizer_config.json beside config.json"
        )
    return tokenizer if date is None else writing_date(tokenizer, date)


def writing_date(tokenizer: Any, date: datetime.date) -> Any:
    """Return the tokenizer, whose chat template writes `date` where it asks for today's from now on."""
    # A template's arguments hide the functions of the same name that transformers gives it.
    tokenizer.apply_chat_template = functools.partial(
        tokenizer.apply_chat_template, strftime_now=date.strftime
    )
    return tokenizer


def from_folder(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """What AutoTokenizer gives, with its errors; by the class itself where that is known, because AutoTokenizer imports torch."""
    folder = Path(model_path)
    said = _fields(folder / "tokenizer_config.json")
    name = CLASSES.get(str(said.get("tokenizer_class")), "")
    model_type = _fields(folder / "config.json").get("model_type", "")
    if (
        model_type in AS_SAID.get(name, ())
        and "auto_map" not in said
        and (folder / "tokenizer.json").is_file()
    ):
        import transformers

        return getattr(transformers, name).from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def _fields(path: Path) -> dict[str, Any]:
    """Of a JSON file; none where it cannot be read, because what is wrong with it is transformers' to say."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def own_code(folder: Path) -> str:
    """The file of the Python code that is the folder's tokenizer; empty where it has a usual one."""
    found = _fields(folder / "tokenizer_config.json").get("auto_map", [])
    classes = found.get("AutoTokenizer", []) if isinstance(found, dict) else found
    references = [classes] if isinstance(classes, str) else [each for each in classes if each]
    return f"{references[0].rpartition('.')[0]}.py" if references else ""
