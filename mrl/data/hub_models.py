"""Find models named as on the Hugging Face hub: Qwen/Qwen2.5-0.5B-Instruct, or with the prefix hf://.

With a network, `snapshot_download` puts missing files into the hub's cache. Without one, the cache is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mrl.data.hub import PREFIX, is_set
from mrl.errors import ConfigError

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
CONFIG_FILES = ("config.json",)
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors", "README.md", "LICENSE*")
"""All files that training and exports read; a repository may have the weights in other formats too."""


def is_hub_name(path: str) -> bool:
    """Return True if a path names a model of the hub: hf://OWNER/NAME, or OWNER/NAME that is no path here."""
    name = path.removeprefix(PREFIX)
    return _NAME.fullmatch(name) is not None and (name != path or not os.path.lexists(path))


def names_model(path: str) -> bool:
    """Return True if a path is a model folder, or names a model of the hub, in the cache or not."""
    return is_hub_name(path) or os.path.isfile(os.path.join(path, "config.json"))


def model_folder(
    path: str, setting: str, *, files: Sequence[str] = MODEL_FILES, download: bool = True
) -> str:
    """Return the local folder of a model; any other path than a hub name is returned as it is.

    Args:
        setting: Setting of the path, for the error.
        files: Patterns of the files to download.
        download: Also use the network, unless HF_HUB_OFFLINE is set.

    Raises:
        ConfigError: The model is not in the hub's cache and cannot be downloaded.
    """
    if not is_hub_name(path):
        return path
    import huggingface_hub

    name = path.removeprefix(PREFIX)
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=[*files], local_files_only=not download)
    except (OSError, ValueError) as error:
        offline = " (or set HF_HUB_OFFLINE=0 here)" if is_set("HF_HUB_OFFLINE") else ""
        reason = (
            str(error).strip().partition("\n")[0] if download and not offline else "nothing was downloaded"
        )
        raise ConfigError(
            f"{setting} = {path} does not exist, and the hub's cache has no model of this name ({reason}); "
            f"use a Hugging Face folder, or run `hf download {name}` on a machine with a network{offline} "
            "and copy the result, which is under HF_HOME"
        ) from error
