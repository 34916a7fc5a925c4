"""Layers: which package may import which, and which engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.structure import imports
from tests.support import chat_tokenizers
from tests.support.source_tree import modules

LAYERS = [
    [
        "mrl.compile_cache", "mrl.errors", "mrl.files", "mrl.user_code", "mrl.processes",
        "mrl.reward_labels", "mrl.routes", "mrl.samples", "mrl.sampling_masks", "mrl.section",
        "mrl.tokenizer_folder",
        "mrl.models.layout",
    ],
    ["mrl.rewards"],
    ["mrl.rewards.code", "mrl.rewards.judges", "mrl.rewards.maths", "mrl.rewards.plugins"],
    ["mrl.rewards.instructions"],
    ["mrl.rewards.kinds"],
    ["mrl.config"],
    ["mrl.models", "mrl.models.facts", "mrl.resharding.wire", "mrl.observe"],
    [
        "mrl.algorithms", "mrl.cpu", "mrl.diagnosis", "mrl.models.kernels", "mrl.models.megatron",
        "mrl.pool", "mrl.report", "mrl.resharding.planner", "mrl.training.platform",
    ],
    [
        "mrl.resharding.transfer",
        "mrl.training.checkpoint",
    ],
    ["mrl.agents", "mrl.data", "mrl.rewards.pool"],
    ["mrl.prepare", "mrl.resharding.vllm", "mrl.rewards.trials", "mrl.training.hf"],
    ["mrl.rollout", "mrl.training"],
    ["mrl.gateway"],
    ["mrl.trajectories"],
    ["mrl.capacity", "mrl.loops"],
    ["mrl.launch"],
    ["mrl.cli", "mrl"],
    ["benchmarks"],
]  # fmt: skip
"""Bottom first; a package imports its own layer and those above it. Unnamed folders are their parent's."""

ENGINES = {
    "vllm": ("mrl.cpu", "mrl.rollout", "mrl.resharding.vllm", "benchmarks"),
    "megatron": ("mrl.cpu", "mrl.training", "mrl.models.megatron", "benchmarks"),
    "ray": ("mrl.launch",),
    "nixl_cu13": ("mrl.resharding.wire",),
    "torch.distributed": (
        "mrl.cpu", "mrl.launch", "mrl.training", "mrl.models.megatron", "mrl.resharding.transfer",
        "mrl.resharding.wire", "benchmarks",
    ),
}  # fmt: skip
"""Who may import an engine, by prefix of the module's name."""


def layer(name: str) -> int:
    prefixes = [
        (p, n) for n, names in enumerate(LAYERS) for p in names if name == p or name.startswith(p + ".")
    ]
    return max(prefixes, key=lambda item: len(item[0]))[1]


def test_a_module_imports_only_its_own_layer_and_those_below() -> None:
    known = modules()
    higher = {name: above for name in known if (above := _higher(name, known))}
    assert not higher, "\n".join(
        f"{name} (layer {layer(name)}) imports {above}" for name, above in higher.items()
    )


def _higher(name: str, known: dict[str, Path]) -> list[str]:
    imported = imports(known[name])
    packages = {i for i in imported if any(j.startswith(i + ".") and j in known for j in imported)}
    return sorted(i for i in imported & known.keys() - packages if layer(i) > layer(name))


def test_no_test_imports_another_one() -> None:
    """Code that two tests share is a module of its own."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    users = {f.name: [i for i in imports(f) if "tests" in i and ".test_" in i] for f in files}
    assert files and not any(users.values()), {name: used for name, used in users.items() if used}


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_are_touched_in_their_packages_only(engine: str) -> None:
    users = [
        n for n, p in modules().items() if any(i == engine or i.startswith(engine + ".") for i in imports(p))
    ]
    strangers = [n for n in users if not n.startswith(ENGINES[engine])]
    assert users and not strangers, f"{engine} is imported by {strangers}"


def loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    code = f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    ).stdout.split()


def test_configuration_imports_no_engine() -> None:
    statement = "import mrl.config, mrl.config.load, mrl.config.describe"
    assert loaded_by(statement, ("torch", "ray", "vllm", "megatron", "transformers")) == []


def test_the_interface_imports_nothing_until_it_is_used() -> None:
    assert loaded_by("import mrl", ("torch", "numpy", "pydantic", "yaml", "ray", "mrl.errors")) == []
    engines = ("torch", "ray", "vllm", "megatron", "transformers")
    assert loaded_by("import mrl\nmrl.load_reward({'kind': 'maths'})\nmrl.score", engines) == []


def test_rows_are_shown_without_torch(tmp_path: Path) -> None:
    """`mrl data` with the quickstart's tokenizer: torch alone would take half of its processor time."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    model = f"model={{path: {tmp_path}/model, new: {{tokenizer: characters}}}}"
    rows = f"data={{train: {tmp_path}/rows.jsonl, validation: null}}"
    command = ["data", "configs/quickstart.yaml", model, rows, "loop.validation.every_steps=0"]
    statement = (
        "import contextlib, io, mrl.cli\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        f" assert not mrl.cli.main({command!r})"
    )
    assert loaded_by(statement, ("torch", "ray", "vllm", "megatron")) == []


def test_conversations_for_a_reward_model_are_made_without_torch(tmp_path: Path) -> None:
    """A reward process that uses one would need eight times the memory."""
    tokenizer = chat_tokenizers.qwen()
    tokenizer.save_pretrained(tmp_path)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id + 1}
    config = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, **ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = (
        "from mrl.rewards.judges.reward_model_judge import ConversationEncoder\n"
        f"ConversationEncoder({str(tmp_path)!r})"
    )
    assert loaded_by(made, ("torch", "ray", "vllm", "megatron")) == []


PURE = {
    ("ray", "vllm", "megatron"): (
        "mrl.algorithms",
        "mrl.observe",
        "mrl.models.kernels",
    ),
    ("ray", "vllm", "megatron", "torch"): (
        "mrl.capacity", "mrl.data", "mrl.diagnosis", "mrl.pool", "mrl.processes", "mrl.rewards.pool",
        "mrl.rewards.plugins", "mrl.report", "mrl.models", "mrl.resharding.planner",
    ),
}  # fmt: skip
"""Imports that packages must not load, except folders listed in LAYERS."""


@pytest.mark.parametrize("engines", PURE, ids=" ".join)
def test_pure_packages_import_no_engine(engines: tuple[str, ...]) -> None:
    inner = [
        n
        for package in PURE[engines]
        for n in modules()
        if n == package or (n.startswith(package + ".") and layer(n) == layer(package))
    ]
    assert loaded_by("\n".join(f"import {n}" for n in inner), engines) == []


def test_no_imports_run_in_a_circle() -> None:
    """Imports inside functions count: two files that need one to break a circle belong together."""
    known = modules()
    needs = {name: (imports(path) & set(known)) - {name} for name, path in known.items()}
    while free := [name for name, wanted in needs.items() if not wanted & set(needs)]:
        needs = {name: wanted for name, wanted in needs.items() if name not in free}
    circle = {name for name in needs if any(name in wanted for wanted in needs.values())}
    assert not circle, f"these import each other in a circle: {sorted(circle)}"


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Entries of LAYERS count as folders; benchmarks may import whatever they measure."""
    known = {name: path for name, path in modules().items() if not name.startswith(LAYERS[-1][0])}
    named = {name for names in LAYERS for name in names}
    folders = {
        name: name if name in named or path.name == "__init__.py" else name.rpartition(".")[0]
        for name, path in known.items()
    }
    needs: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for name, path in known.items():
        needs[folders[name]] |= {folders[i] for i in imports(path) & set(known)} - {folders[name]}
    while free := [folder for folder, used in needs.items() if not used & set(needs)]:
        needs = {folder: used for folder, used in needs.items() if folder not in free}
    circle = {folder for folder in needs if any(folder in used for used in needs.values())}
    assert not circle, f"these folders import each other in a circle: {sorted(circle)}"
