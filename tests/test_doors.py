"""The doors of the house: which room may import which, and which engines it may touch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEVELS = {
    0: ("mrl.errors", "mrl.config", "mrl.samples", "models.manifest", "models.names", "models.layer_rows", "models.qwen3_names",
        "models.mixtral_names", "models.deepseek_v3_names", "models.rope", "models.float8", "models.unsupported", "models.families", "models.facts",
        "models.vllm_names", "resharding.layout", "mrl.rollout.request"),
    1: ("mrl.algorithms", "mrl.judges", "mrl.data", "mrl.observe", "mrl.prepare", "resharding.manifest", "resharding.sources",
        "resharding.destinations", "resharding.plan", "resharding.simulate", "resharding.boxes", "resharding.copies",
        "resharding.part", "resharding.patterns", "resharding.topology", "resharding.windows", "resharding.explain",
        "resharding.rehearsal", "resharding.wire", "resharding.quantised", "resharding.alignment", "resharding.agreement", "resharding.fp8", "resharding.cells"),
    2: ("models", "mrl.rollout", "mrl.training", "resharding"),
    3: ("mrl.loops",),
    4: ("launch",),
    5: ("mrl.cli", "mrl"),
}  # fmt: skip

ENGINES = {
    "vllm": ("mrl.rollout", "resharding.vllm"),
    "megatron": ("mrl.training", "models"),
    "ray": ("launch",),
}
"""Who may import an engine (by prefix of the module's name)."""


def modules() -> dict[str, Path]:
    files = [f for room in ("mrl", "models", "resharding", "launch") for f in (ROOT / room).rglob("*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def level(name: str) -> int:
    prefixes = [(p, n) for n, names in LEVELS.items() for p in names if name == p or name.startswith(p + ".")]
    return max(prefixes, key=lambda item: len(item[0]))[1]


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_room_imports_only_its_own_level_and_below(name: str) -> None:
    known = modules()
    found = imports(known[name])
    packages = {i for i in found if any(j.startswith(i + ".") and j in known for j in found)}
    inner = {i for i in found if i in known and i != name} - packages
    higher = sorted(i for i in inner if level(i) > level(name))
    assert not higher, f"{name} (level {level(name)}) imports {higher}"


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_are_touched_in_their_rooms_only(engine: str) -> None:
    users = [
        n for n, p in modules().items() if any(i == engine or i.startswith(engine + ".") for i in imports(p))
    ]
    strangers = [n for n in users if not n.startswith(ENGINES[engine])]
    assert users and not strangers, f"{engine} is imported by {strangers}"


def loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    code = f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


def test_configuration_imports_no_engine() -> None:
    statement = "import mrl.config, mrl.config.load, mrl.config.describe"
    assert loaded_by(statement, ("torch", "ray", "vllm", "megatron", "transformers")) == []


PURE = [
    "mrl.algorithms",
    "mrl.judges",
    "mrl.data",
    "mrl.observe",
    "resharding.sources",
    "resharding.plan",
    "models.families",
]


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_import_no_engine(room: str) -> None:
    package = modules()[room]
    inner = (
        [n for n in modules() if n == room or n.startswith(room + ".")]
        if package.name == "__init__.py"
        else [room]
    )
    assert loaded_by("\n".join(f"import {n}" for n in inner), ("ray", "vllm", "megatron")) == []


def test_no_imports_run_in_a_circle() -> None:
    """Imports inside functions count: what needs one to break a circle is two files that are one."""
    known = modules()
    needs = {name: (imports(path) & set(known)) - {name} for name, path in known.items()}
    while free := [name for name, wanted in needs.items() if not wanted & set(needs)]:
        needs = {name: wanted for name, wanted in needs.items() if name not in free}
    rest = {name for name in needs if any(name in wanted for wanted in needs.values())}
    assert not rest, f"these import each other in a circle: {sorted(rest)}"
