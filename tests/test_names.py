"""Check names: one home for each public name, nouns for locals, docstrings that say what a thing does."""

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.structure import CLASSES, FUNCTIONS, homes_of, modules_of, shared_base_names
from tests.support.source_tree import ROOT

MOST_SHARED_FILES = 6
"""File names that another file of the same top-level folder has: agents, sections, loops, rollout."""
NO_NOUNS = {"found", "own", "each", "said", "told", "asked", "more", "rest", "what", "it"}
"""Names that say nothing of a local or parameter."""
NO_VERBS = ("Of ", "Whether", "Those", "What")
"""Beginnings of docstrings that make a reader look for the sentence."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every Python file of the repository by its path, with its syntax tree."""
    for folder in ("mrl", "models", "resharding", "launch", "benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def listed(homes: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {', '.join(files)}" for name, files in homes.items())


def test_a_public_class_name_has_one_home() -> None:
    shared = homes_of(modules_of(ROOT), *CLASSES)
    assert not shared, f"rename all but one of each, or make them private:\n{listed(shared)}"


def test_a_public_function_name_has_one_home() -> None:
    shared = homes_of(modules_of(ROOT), *FUNCTIONS)
    assert not shared, f"rename all but one of each:\n{listed(shared)}"


def test_few_files_share_a_base_name() -> None:
    shared = shared_base_names(modules_of(ROOT))
    assert sum(map(len, shared.values())) <= MOST_SHARED_FILES, (
        f"rename all but one of each:\n{listed(shared)}"
    )


def test_homes_are_those_of_public_names_at_the_top_level(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("class Row: ...\nclass _Own: ...\nasync def read(): ...\ndef main(): ...\n")
    second.write_text(
        "def read(): ...\nclass Row:\n    def text(self): ...\nclass _Own: ...\ndef main(): ...\n"
    )
    modules = {"first": first, "second": second}
    assert homes_of(modules, *CLASSES) == {"Row": ["first.py", "second.py"]}
    assert homes_of(modules, *FUNCTIONS) == {"read": ["first.py", "second.py"]}


def test_locals_and_parameters_are_nouns() -> None:
    bad = [
        f"{path}:{node.lineno}: {name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if (name := stored_name(node)) in NO_NOUNS and isinstance(node, (ast.Name, ast.arg))
    ]
    assert not bad, "name each after the thing that it is:\n" + "\n".join(bad)


def stored_name(node: ast.AST) -> str | None:
    """Return the name that a node stores or declares; None for other nodes."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    return node.arg if isinstance(node, ast.arg) else None


def test_docstrings_say_what_a_thing_does() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    bad = [
        f"{path}: {getattr(node, 'name', 'module')}: {text[:60]}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "").startswith(NO_VERBS)
    ]
    assert not bad, "begin with a verb, or with a noun for a class:\n" + "\n".join(bad)
