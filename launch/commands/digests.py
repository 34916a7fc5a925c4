"""Digests of a model's and its rewards' files, to recognise the same measurement wherever the files are."""

from __future__ import annotations

import hashlib
import json
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.training.checkpoint.checkpoint_folder import digests, file_digest
from mrl.user_code import search_path

_OF_A_TOKENIZER = frozenset({".json", ".jinja", ".txt", ".model", ".py"})


def model_digest(path: str) -> str:
    """Return a hex SHA-256 over names, sizes and SHA-256 of the files of a model folder."""
    return _folder_digest(Path(path), [file.name for file in Path(path).iterdir() if file.is_file()])


def engine_contents(section: RewardSection) -> dict[str, str]:
    """Return the digest of each engine's model, or its path if the folder does not exist."""
    return {
        name: model_digest(engine.model) if Path(engine.model).is_dir() else engine.model
        for name, engine in section.engines.items()
    }


def part_contents(part: KindPart, include: set[str]) -> dict[str, Any]:
    """Return the `include` settings of a verifier as JSON values, with digests of files and folders."""
    tree = part.model_dump(mode="json", include=include)
    if part.kind == "plugin" and "path" in tree:
        place, _, name = str(part.path).rpartition(":")
        file = Path(place) if place.endswith(".py") else _module_file(place)
        tree["path"] = f"{_file_digest(file) or place}:{name}"
    folder = Path(part.server.tokenizer or "")
    if part.server.tokenizer and "server" in tree and folder.is_dir():
        names = [file.name for file in folder.iterdir() if file.suffix in _OF_A_TOKENIZER and file.is_file()]
        tree["server"]["tokenizer"] = _folder_digest(folder, names)
    template = tree.get("llm", {}).get("template")
    if template is not None:
        tree["llm"]["template"] = _file_digest(Path(template)) or template
    return tree


def _folder_digest(folder: Path, names: list[str]) -> str:
    files = digests(folder, names, hashlib.sha256)
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _file_digest(file: Path | None) -> str | None:
    """Return a file's digest; None if it does not exist (its user reports that)."""
    return file_digest(file, hashlib.sha256) if file is not None and file.is_file() else None


def _module_file(name: str) -> Path | None:
    """Return the source file of a module without running it or its packages."""
    path: Any = search_path()
    spec = None
    for depth in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:depth]), path)
        path = spec.submodule_search_locations if spec else None
        if depth <= name.count(".") and path is None:
            return None
    return Path(spec.origin) if spec and spec.origin else None
