"""Malformed configurations: a seeded mutation of a recipe is refused in one sentence, or read as written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import dump, load, load_config
from mrl.config.root import Config
from mrl.files import CONFIGS
from tests.support.bad_files import failures, outcome
from tests.support.mutations import LITERALS, STRANGE, Mutator

CASES = 300
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if CONFIGS / "hardware" not in path.parents)
BASE = {
    "run": {"name": "base"},
    "model": {"path": "model"},
    "data": {"train": "rows.jsonl"},
    "reward": {"kind": "maths"},
}


def paths_of(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from paths_of(value, f"{prefix}{name}.")


def case(mutator: Mutator, folder: Path) -> None:
    recipe = mutator.choose(RECIPES)
    path = folder / "config.yaml"
    path.write_bytes(recipe.read_bytes())
    mutator.told.append(recipe.name)
    words: list[str] = []
    if mutator.choose([True, True, False]):
        mutator.spoil(path, "yaml")
    else:
        words = [word_of(mutator) for _ in range(mutator.choose([1, 1, 2, 5]))]
        mutator.told += [word[:80] for word in words]
    config, _ = outcome(lambda: load_config(BASE, str(path), *words))
    if config is not None:
        require_whole(config)


def word_of(mutator: Mutator) -> str:
    """Return a command-line setting with a strange or malformed value."""
    name = mutator.choose(list(paths_of(load([BASE]).model_dump(mode="json"))))
    value = mutator.choose(
        [*map(str, STRANGE), *LITERALS, "[" * 5000, "{a: 1, a: 2}", "[{a: 1, a: 2}]", "&a [*a]", "? [a]"]
    )
    return mutator.choose(
        [
            f"{name}={value}", f"{name}.{name}={value}", f"{name}", f"={value}", f"{name}=={value}",
            f"{name}=[{value}]",
        ]
    )  # fmt: skip


def require_whole(config: Config) -> None:
    """Check that a configuration can be written, reads back equal, and contains only finite numbers."""
    text, _ = outcome(lambda: dump(config))
    assert text is not None
    for name, value in numbers(config.model_dump()):
        assert not math.isnan(value), name
    assert config.model_dump() == load_text(text).model_dump()


def load_text(text: str) -> Config:
    import yaml

    config, message = outcome(lambda: load([yaml.safe_load(text)]))
    assert config is not None, message
    return config


def numbers(tree: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tree, float):
        yield name, tree
    for key, value in (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    ):
        yield from numbers(value, f"{name}.{key}")


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_malformed_configurations(every: int, tmp_path: Path) -> None:
    report = failures("config", range(0, CASES, every), case, tmp_path)
    assert not report, report
