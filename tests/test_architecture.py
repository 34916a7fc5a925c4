"""The reading list of docs/architecture.md, and the size of classes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.structure import imports
from tests.support.source_tree import modules

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MOST_METHODS = 25


def listed(title: str) -> list[str]:
    """Return the files of the paragraph that begins with a title."""
    (paragraph,) = (part for part in PAGE.split("\n\n") if part.startswith(f"**{title}"))
    return re.findall(r"`([\w/]+\.py)`", paragraph)


@pytest.mark.parametrize(("title", "most"), [("A step", 14), ("A sample", 12)])
def test_a_way_through_the_code_is_short_and_hangs_together(title: str, most: int) -> None:
    """Each file imports another of the list, or is imported by one."""
    files = listed(title)
    assert 3 < len(files) <= most and len(set(files)) == len(files)
    names = {_module(file): file for file in files}
    known = modules()
    assert set(names) <= set(known), "a file that is listed is not there"
    used = {name: set(imports(known[name])) for name in names}
    alone = [
        file for name, file in names.items() if not any(_reaches(used, a, b) for a, b in _pairs(name, names))
    ]
    assert not alone, f"nothing of the way leads to or from {alone}"


def _module(file: str) -> str:
    path = file if file.startswith("mrl/") else f"mrl/{file}"
    return path.removesuffix(".py").replace("/", ".")


def _pairs(name: str, names: dict[str, str]) -> list[tuple[str, str]]:
    others = [other for other in names if other != name]
    return [(name, other) for other in others] + [(other, name) for other in others]


def _reaches(used: dict[str, set[str]], user: str, name: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for module in used[user])


def test_no_class_has_more_methods_than_one_can_hold_in_mind() -> None:
    counts = {
        f"{name}.{node.name}": sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    large = {name: count for name, count in counts.items() if count > MOST_METHODS}
    assert not large, f"more than {MOST_METHODS} methods: {large}"
