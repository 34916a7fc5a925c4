"""Print the size and shape of the code: lines, words, settings, arrows, and names with more than one home.

    python -m benchmarks.structure [CHECKOUT]

An arrow of a folder is a pair of its entries (files and folders directly in it), one of which imports the
other. A name has more than one home if two modules define a public class, or a public function, of that name
at their top level. Arrows and homes exclude tests and benchmarks. The checkout's own code counts settings.
Older checkouts, whose folders were imported by their bare names, work too.
"""

from __future__ import annotations

import ast
import functools
import io
import os
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
TOP = ("mrl", "models", "resharding", "launch")
OUTSIDE = ("tests", "benchmarks", "examples")
MADE = ("settings.md", "metrics.md", "recipes.md")
"""Pages that `make docs` writes from the code, left out of the words."""
CLASSES = (ast.ClassDef,)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COUNT_SETTINGS = """
from mrl.config.describe import settings
print(sum(not setting.form.startswith(": section") for setting in settings()))
"""
"""Counts the settings that `mrl settings` lists, without sections."""


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    modules = modules_of(root)
    lines, code = (sum(map(count, modules.values())) for count in (lines_of, code_lines_of))
    print(f"lines {lines} in {len(modules)} files, {code} of them code")
    for folder in OUTSIDE:
        files = sorted((root / folder).rglob("*.py"))
        print(f"lines of {folder} {sum(map(lines_of, files))} in {len(files)} files")
    pages = pages_of(root)
    print(f"words of docs {sum(len(page.read_text().split()) for page in pages)} in {len(pages)} pages")
    print(f"settings {num_settings(root)}")
    arrows = arrows_of(modules)
    folders = {entry.rpartition("/")[0] for entry in modules}
    inside = {folder: face(arrows, folder) for folder in sorted(folders)}
    for folder, count in inside.items():
        print(f"  {folder}: {count} arrows")
    between = {(a.rpartition("/")[0], b.rpartition("/")[0]) for a, b in arrows}
    print(f"arrows between folders {sum(a != b for a, b in between)} of {len(folders)} folders")
    for title, kinds in (("classes", CLASSES), ("functions", FUNCTIONS)):
        homes = homes_of(modules, *kinds)
        names = ", ".join(f"{name} {len(files)}" for name, files in homes.items())
        print(f"{title} with more than one home {len(homes)}: {names}")
    shared = shared_base_names(modules)
    print(f"files that share a base name {sum(map(len, shared.values()))}: {', '.join(shared)}")


def modules_of(root: Path) -> dict[str, Path]:
    """Return each file by its path from the root without suffix; a package is the path of its __init__."""
    files = [path for top in TOP for path in (root / top).rglob("*.py")]
    return {str(path.relative_to(root).with_suffix("")): path for path in files}


def pages_of(root: Path) -> list[Path]:
    """Return README.md and the pages of docs/ that people write."""
    pages = [path for path in (root / "docs").rglob("*.md") if path.name not in MADE]
    return [root / "README.md", *sorted(pages)]


def num_settings(root: Path) -> int:
    """Return the number of settings, counted in a process that imports the checkout's own mrl."""
    program = [sys.executable, "-c", COUNT_SETTINGS]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        program, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def code_lines_of(path: Path) -> int:
    """Count lines of code: not blank, not comments, not strings that are statements."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def arrows_of(modules: dict[str, Path]) -> set[tuple[str, str]]:
    """Return pairs of files, the first of which imports the second, also inside functions."""
    named = {}
    for entry in modules:
        dotted = entry.replace("/", ".").removesuffix(".__init__")
        named[dotted] = named[f"mrl.{dotted}"] = entry
    pairs = set()
    for entry, path in modules.items():
        for name in imports(path):
            if name in named and named[name] != entry and not named[name].endswith("__init__"):
                pairs.add((entry, named[name]))
    return pairs


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports: each module and each name of a `from`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def face(arrows: set[tuple[str, str]], folder: str) -> int:
    """Count the arrows between the entries directly in a folder."""
    ends = {(entry(a, folder), entry(b, folder)) for a, b in arrows if _in(a, folder) and _in(b, folder)}
    return sum(a != b for a, b in ends)


def _in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def entry(path: str, folder: str) -> str:
    """Return the entry of a folder that contains a file.

    >>> entry("mrl/rewards/pool/queues", "mrl/rewards")
    'pool'
    """
    return path.removeprefix(f"{folder}/").partition("/")[0]


def homes_of(modules: dict[str, Path], *kinds: type[ast.stmt]) -> dict[str, list[str]]:
    """Return the files of each public top-level name of these kinds that has more than one, except `main`."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, file in sorted(modules.items()):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, kinds) and not (name := getattr(node, "name", "_")).startswith("_"):
                homes[name].append(f"{path}.py")
    return {name: files for name, files in sorted(homes.items()) if len(files) > 1 and name != "main"}


def shared_base_names(modules: dict[str, Path]) -> dict[str, list[str]]:
    """Return the files of each base name that a top-level folder has more than once, except `__init__`."""
    named: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(modules):
        top, base = path.partition("/")[0], path.rpartition("/")[2]
        if base != "__init__":
            named[top, base].append(f"{path}.py")
    return {base: files for (_, base), files in named.items() if len(files) > 1}


if __name__ == "__main__":
    main()
