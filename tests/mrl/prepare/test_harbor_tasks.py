"""Folders of Harbor tasks become rows: images, limits, refusals, and the check by solutions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.data import ColumnMap, DataEntry
from mrl.data.row_shapes import read_row
from mrl.errors import ConfigError
from mrl.prepare import harbor_tasks
from mrl.prepare.harbor_tasks import write_harbor
from tests.support.pretended_docker import calls_of, install_docker
from tests.support.source_tree import ROOT

TASKS = ROOT / "tests/data/harbor_tasks"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a copy of the task `reversed`, whose image the pretended docker makes."""
    monkeypatch.setenv("PATH", str(install_docker(tmp_path / "docker")), prepend=":")
    shutil.copytree(TASKS / "reversed", tmp_path / "tasks/reversed")
    return tmp_path / "tasks"


def written(tasks: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a folder of tasks."""
    out = tasks.parent / "out"
    write_harbor([tasks], out, **options)
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_tasks_become_rows(tasks: Path) -> None:
    """The solutions of both earn a reward in bubblewrap, from their images."""
    shutil.copytree(TASKS / "fraction", tasks / "more/fraction")
    fraction, reversed_ = written(tasks, unpack=True)
    path = "/usr/local/bin:/usr/bin:/bin"
    assert reversed_ == {
        "prompt": [
            {
                "role": "user",
                "content": "Write the word of /app/word.txt, reversed, to /app/answer.txt. "
                "Delete /app/scratch.txt.",
            }
        ],
        "tag": "text",
        "harbor": {
            "name": "reversed",
            "image": reversed_["harbor"]["image"],
            "root": reversed_["harbor"]["root"],
            "workdir": "/app",
            "keep": ["*"],
            "env": {"PATH": path, "LANGUAGE": "none"},
            "verifier_env": {},
            "agent_seconds": 60.0,
            "verifier_seconds": 30.0,
            "cpus": 1.0,
            "memory_mib": 1024,
        },
    }
    assert fraction["harbor"] == {
        "name": "more/fraction",
        "image": "example.org/pages:3",
        "root": fraction["harbor"]["root"],
        "workdir": "/srv/pages",
        "keep": ["out", "out/*"],
        "env": {"PATH": path},
        "verifier_env": {"WANTED": "2"},
        "agent_seconds": None,
        "verifier_seconds": 30.0,
        "cpus": None,
        "memory_mib": 512,
    }
    entry = DataEntry(path="rows.jsonl", columns=ColumnMap(tag="tag"))
    row = read_row(reversed_, place="rows.jsonl:1", entry=entry, shape="trl")
    assert row.tag == "text" and row.metadata["harbor"] == reversed_["harbor"]
    out = tasks.parent / "out"
    assert (out / "tasks/more/fraction/work/words").read_text() == "one two\n"
    assert not [path for path in out.rglob("*") if path.name in ("solve.sh", "solution")]
    for task in (fraction, reversed_):
        root = out / "roots" / task["harbor"]["root"]
        assert (root / "etc/hosts").read_text() == "127.0.0.1 localhost\n"
        assert not (root / "usr/bin/sh").stat().st_mode & 0o6000, "it belongs to the image's root"


def test_images_are_built_or_pulled(tasks: Path) -> None:
    shutil.copytree(TASKS / "fraction", tasks / "fraction")
    fraction, reversed_ = written(tasks, unchecked=True)
    image, out = reversed_["harbor"]["image"], tasks.parent / "out"
    assert fraction["harbor"]["root"] is reversed_["harbor"]["root"] is None
    assert re.fullmatch("mrl-harbor:[0-9a-f]{16}", image)
    assert fraction["harbor"]["image"] == "example.org/pages:3"
    container = image.replace("/", "_")
    assert calls_of(tasks.parent / "docker") == [
        ["image", "inspect", "example.org/pages:3"],
        ["pull", "example.org/pages:3"],
        ["image", "inspect", "--format", "{{json .Config}}", "example.org/pages:3"],
        ["create", "example.org/pages:3", "true"],
        ["cp", "example.org_pages:3:/srv/pages/.", f"{out}/tasks/fraction/work"],
        ["rm", "example.org_pages:3"],
        ["build", "--tag", image, f"{tasks}/reversed/environment"],
        ["image", "inspect", "--format", "{{json .Config}}", image],
        ["create", image, "true"],
        ["cp", f"{container}:/app/.", f"{out}/tasks/reversed/work"],
        ["rm", container],
    ]
    edit(tasks / "reversed/environment/Dockerfile", "none", "other")
    shutil.rmtree(out)
    assert written(tasks, unchecked=True)[1]["harbor"]["image"] != image, "another image has another name"


REFUSED = {
    "environment.gpus": "gpus = 1",
    "environment.healthcheck": 'healthcheck = { command = "true" }',
    "environment.mcp_servers": 'mcp_servers = [{ name = "x", url = "http://x" }]',
    "environment.skills_dir": 'skills_dir = "/skills"',
    "environment.os = 'windows'": 'os = "windows"',
    "environment.env.KEY takes a variable of this machine": 'env = { KEY = "${KEY}" }',
    "environment.cpus = 'two'": 'cpus = "two"',
    "task.toml has a value of another type": 'memory = "much"',
    "the working folder '/usr/bin'": 'workdir = "/usr/bin"',
    "the image's working folder is '/'": 'workdir = "/"',
    "verifier.environment is": '[verifier.environment]\ndocker_image = "x"',
    "verifier.collect": '[[verifier.collect]]\ncommand = "x"',
    "steps is not supported": '[[steps]]\nname = "one"',
    "artifacts.service": '[[artifacts]]\nsource = "/app/x"\nservice = "database"',
    "the artifact '/etc/x' is not below": '[[artifacts]]\nsource = "/etc/x"',
    "a file cannot be read": "gpus",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    reason: str, tasks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tasks / "reversed/task.toml"
    for line in ("cpus = 1\n", 'memory = "1G"\n', "gpus = 0\n"):
        edit(config, line, "")
    if "artifact" in reason:
        edit(config, "[verifier]", '[verifier]\nenvironment_mode = "separate"')
    config.write_text(config.read_text() + REFUSED[reason] + "\n")
    with pytest.raises(ConfigError, match="no task is left, 1 are left out"):
        written(tasks, unchecked=True)
    assert reason in caplog.text
    assert not list((tasks.parent / "out").glob("tasks/*"))


FILES: dict[str, Callable[[Path], object]] = {
    "environment/docker-compose.yaml": lambda task: (task / "environment/docker-compose.yaml").touch(),
    "no instruction.md (tasks of several steps": lambda task: (
        (task / "instruction.md").unlink(),
        (task / "steps").mkdir(),
    ),
    "no tests/test.sh": lambda task: (task / "tests/test.sh").unlink(),
    "neither environment/Dockerfile": lambda task: (task / "environment/Dockerfile").unlink(),
    "docker build": lambda task: (task / "environment/Dockerfile").write_text("RUN x"),
    "10002 files": lambda task: edit(task / "environment/Dockerfile", "COPY", "MANY 10000\nCOPY"),
    "environment.network_mode is not no-network": lambda task: edit(
        task / "task.toml", "allow_internet = false", ""
    ),
}


@pytest.mark.parametrize("reason", FILES)
def test_a_task_without_what_it_needs_is_refused(
    reason: str, tasks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FILES[reason](tasks / "reversed")
    with pytest.raises(ConfigError, match="no task is left"):
        written(tasks, unchecked=True)
    assert reason in caplog.text


CHECKS: dict[str, Callable[[Path], object]] = {
    "the solution's reward is 0.0, 0 without it": lambda task: edit(task / "solution/solve.sh", "rm", ": rm"),
    "the solution's reward is None": lambda task: edit(task / "solution/solve.sh", "rm", ": > stop; rm"),
    "the verifier gives no reward": lambda task: edit(task / "tests/test.sh", "reward.txt", "other.txt"),
    "the solution's reward is 1.0, 1 without it": lambda task: edit(
        task / "tests/test.sh", "reward=0", "reward=1"
    ),
    "there is no solution/solve.sh": lambda task: shutil.rmtree(task / "solution"),
}


@pytest.mark.parametrize("reason", CHECKS)
def test_a_task_that_its_solution_does_not_solve_is_left_out(
    reason: str, tasks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(tasks / "reversed/tests/test.sh", "reward=0\n", "reward=0\n[ -e stop ] && exit 1\n")
    CHECKS[reason](tasks / "reversed")
    shutil.copytree(TASKS / "fraction", tasks / "fraction")
    assert [row["harbor"]["name"] for row in written(tasks, unpack=True)] == ["fraction"]
    assert f"reversed: left out: {reason}" in caplog.text


def test_an_image_is_unpacked_once(tasks: Path) -> None:
    shutil.copytree(tasks / "reversed", tasks / "again")
    assert len({row["harbor"]["root"] for row in written(tasks, unpack=True)}) == 1
    assert [call[0] for call in calls_of(tasks.parent / "docker")].count("export") == 1


def test_the_internet_is_no_reason_to_refuse_what_its_solution_solves(tasks: Path) -> None:
    edit(tasks / "reversed/task.toml", "allow_internet = false", 'network_mode = "public"')
    assert len(written(tasks, unpack=True)) == 1


def test_folders_are_checked(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tasks / "reversed", tasks.parent / "others/reversed")
    with pytest.raises(ConfigError, match="two tasks have the name 'reversed'"):
        write_harbor([tasks, tasks.parent / "others"], tasks.parent / "both", unchecked=True)
    with pytest.raises(ConfigError, match="is not empty"):
        write_harbor([tasks], tasks)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no command podman"):
        write_harbor([tasks], tasks.parent / "out", builder="podman")


def test_canary_lines_are_not_shown() -> None:
    text = "# benchmark canary x\n<!-- CANARY y -->\n\n# Title\n\nA canary sings.\n"
    assert harbor_tasks._shown(text) == "# Title\n\nA canary sings."
