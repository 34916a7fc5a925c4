"""Where code makes tensors, as its source says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MAKERS = frozenset(
    f"{name}{like}"
    for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
    for like in ("", "_like")
) | {f"new_{name}" for name in ("zeros", "ones", "empty", "full", "tensor")}
MAKERS |= {"arange", "linspace", "eye", "tensor", "as_tensor", "scalar_tensor", "from_numpy", "frombuffer"}
MAKERS |= {"randperm", "tril_indices", "triu_indices", "one_hot", "meshgrid"}
"""Functions of torch and methods of its tensors that make one where none was."""


def builders(file: Path) -> Iterator[tuple[str, int]]:
    """(qualified name of the function, line) of each call that makes a tensor; numpy's are none."""
    yield from _inside(ast.parse(file.read_text(encoding="utf-8")), ())


def _inside(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        yield from _inside(child, (*path, child.name) if named else path)
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and child.func.attr in MAKERS
        ):
            owner = child.func.value
            if not (isinstance(owner, ast.Name) and owner.id == "np"):
                yield ".".join(path), child.lineno
