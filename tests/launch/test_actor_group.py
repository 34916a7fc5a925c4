"""Workers are asked by their own methods: no name of one stands in a string."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("launch/workers", "launch/commands", "mrl/loops")
    for path in (ROOT / folder).glob("*.py")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_method_of_a_worker_is_named_by_a_string(path: Path) -> None:
    """Ray is asked to make actors and to run functions of them (`__ray_call__`), which a type checker follows."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote":
            asked = ast.unparse(node.func.value)
            assert asked == "ray" or asked.endswith(("__ray_call__", ")")), (
                f"{path}:{node.lineno}: {asked}.remote"
            )
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "operator.methodcaller"):
            assert "worker" not in ast.unparse(node) and "actor" not in ast.unparse(node), (
                f"{path}:{node.lineno}"
            )
