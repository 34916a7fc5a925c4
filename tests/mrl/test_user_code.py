"""The user's code: found in the working folder, never mistaken for Python's, named if it raises."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.answer import EnvironmentResult
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_process import _Guest
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.pool import EnvironmentWorkers
from mrl.errors import ConfigError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.plugin_check import check_plugins
from mrl.rewards.pool.score_offline import score
from mrl.user_code import find_callable, place_of, search_path
from tests.support.own_folder import write_modules_named_as_pythons

MINE = """
import helper
def reward(request):
    return helper.length(request.response)
class Environment:
    tools = []
    def reset(self, task, seed):
        return str(helper.length("four"))
"""


@pytest.fixture(params=["mrl", "python -m mrl.cli"])
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a command's working folder, which `python -m` searches first for modules."""
    write_modules_named_as_pythons(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("def length(text):\n    return float(len(text))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*[str(tmp_path)] * (request.param != "mrl"), *sys.path])
    return tmp_path


def test_reward_workers_start(folder: Path) -> None:
    section = RewardSection(kind="plugin", path="mine:reward", workers=1)
    check_plugins(section.all_verifiers())
    (verdict,) = score(section, [{"response": "four", "ground_truth": "4"}])
    assert verdict.value == 4.0, verdict


def test_environments_are_hosted(folder: Path) -> None:
    assert first_text(EnvironmentSpec("mine:Environment")) == "4.0"


def test_an_environment_has_the_packages_of_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before mrl's; what starts from there has none of mrl's."""
    venv.create(tmp_path / "other", with_pip=False)
    packages = tmp_path / f"other/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "openai.py").write_text("HOME = 'other'\n")
    (tmp_path / "mine.py").write_text(
        "import numpy, openai, os, sys\n"
        "class Env:\n"
        "    def reset(self, task, seed):\n"
        "        return f'{openai.HOME} {sys.prefix} {os.environ.get(\"PYTHONPATH\")}'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "nowhere")
    spec = EnvironmentSpec("mine:Env", python=str(tmp_path / "other/bin/python"))
    assert first_text(spec) == f"other {tmp_path / 'other'} nowhere"
    with pytest.raises(ConfigError, match=r"agent.python = 'no/python' is not an executable file"):
        first_text(EnvironmentSpec("mine:Env", python="no/python"))


def first_text(spec: EnvironmentSpec) -> str:
    with EnvironmentWorkers({"mine": spec}, Deadlines()) as pool:
        pool.open("a", "mine", {}, 0)
        answers: list[EnvironmentResult] = []
        while not answers:
            answers += pool.poll(60.0)
    assert len(answers[0].messages) == 1, answers
    return answers[0].messages[0]["content"]


@pytest.mark.parametrize("words", [["export", ".", "--dry-run"], ["report", "nowhere"]])
def test_a_command_runs_nothing_of_the_folder_it_stands_in(words: list[str], tmp_path: Path) -> None:
    """`msvcrt` is imported by many, and does not exist on Linux."""
    write_modules_named_as_pythons(tmp_path)
    (tmp_path / "msvcrt.py").write_text("open('ran', 'w')\n")
    command = [sys.executable, "-P", "-m", "mrl.cli", *words]  # as `mrl` starts
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode and done.stderr.startswith("mrl: "), done
    assert not (tmp_path / "ran").exists()


def test_the_working_folder_is_looked_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "a", os.getcwd(), "b"])
    assert search_path() == ["a", "b", str(tmp_path)]


OWN = """
import json
class Env:
    def reset(self, task, seed):
        return json.loads("no JSON")
def reads(path):
    return open(path).read()
"""


def own(folder: Path, name: str) -> Any:
    (folder / "own.py").write_text(OWN)
    kind = "class" if name == "Env" else "function"
    return find_callable(f"{folder}/own.py:{name}", setting="x", kind=kind)[1]


def test_an_environment_that_raises_is_placed_in_its_own_file(tmp_path: Path) -> None:
    answer = json.loads(_Guest(own(tmp_path, "Env")).answer("open", [{}, 0]))
    assert answer["reason"].startswith("JSONDecodeError") and answer["reason"].endswith(
        f" at {tmp_path}/own.py:5"
    )


def test_a_place_is_the_innermost_line_of_the_user(tmp_path: Path) -> None:
    for path, error in (("/no/such/file", FileNotFoundError), (b"\xff" * 10, OSError)):
        with pytest.raises(error) as raised:
            own(tmp_path, "reads")(path)
        assert place_of(raised.value) == f" at {tmp_path}/own.py:7"
    assert place_of(ValueError("never raised")) == ""


def test_without_a_line_of_the_user_it_is_where_it_was_raised() -> None:
    namespace: dict[str, Any] = {}
    exec(compile("def f():\n    import json\n    json.loads('x')", "<string>", "exec"), namespace)
    try:
        namespace["f"]()
    except ValueError as error:
        caught = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        assert "json" in place_of(caught)
