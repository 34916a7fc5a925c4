"""Tasks of Harbor in bubblewrap: what an agent sees, how its work is graded, and who is to blame."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mrl.agents.adapters.harbor import Harbor, read_reward
from mrl.agents.environment import Step, Unreachable
from mrl.agents.environment_registry import EnvironmentSpec, find_environment
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from mrl.prepare.harbor_tasks import write_harbor
from tests.support.acted_programs import reward_of, sample_of
from tests.support.pretended_docker import install_docker
from tests.support.sandbox_probes import answering
from tests.support.source_tree import ROOT

ASK = """
import json, os, sys, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
body = {"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]}
with urllib.request.urlopen(request, json.dumps(body).encode(), timeout=60) as answer:
    reply = json.load(answer)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(reply)
if "Delete /app/scratch.txt" in sys.argv[1]: os.unlink("scratch.txt")
"""
"""Agent that does what the policy says; further code follows."""
USR: dict[str, Any] = {"mounts": {"/usr": "/usr"}}
"""Sandbox with this machine's Python."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two prepared tasks."""
    folder = tmp_path_factory.mktemp("harbor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(install_docker(folder / "docker")), prepend=":")
        write_harbor([ROOT / "tests/data/harbor_tasks"], folder / "out", unpack=True, unchecked=True)
    return folder / "out"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """Return a copy that a test changes."""
    return Path(shutil.copytree(made, tmp_path / "out", symlinks=True))


def row_of(folder: Path, name: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return next(row for row in rows if row["harbor"]["name"] == name)


def options(folder: Path, code: str = "", **changes: Any) -> dict[str, Any]:
    """Return `agent.options` for an agent in Python, which this machine's /usr has."""
    sandbox = USR | {"disk_mib": 32, "boot_seconds": 30}
    command = ["python3", "-c", ASK + code, "{prompt}"]
    return {"folder": str(folder), "command": command, "memory_mib": 512, "sandbox": sandbox} | changes


def ran(
    folder: Path, code: str = "", *, name: str = "reversed", reply: str = "pu-level", **changes: Any
) -> Step:
    """Run the agent on a task, with a policy that always says `reply`."""
    row = row_of(folder, name)
    row["harbor"] |= {key: changes.pop(key) for key in ("verifier_seconds",) if key in changes}
    with answering(reply) as model:
        return find_environment("harbor")(**options(folder, code, **changes)).run(row, 7, model)


def test_the_tests_of_a_task_grade_the_agent(made: Path) -> None:
    step = ran(made)
    assert (step.reward, step.info["reason"]) == (1.0, "")
    assert ran(made, reply="other").reward == 0.0
    step = ran(made, "sys.exit(3)")
    assert step.reward == 1.0 and "the agent: status 3" in step.info["reason"]
    step = ran(made, "import time; time.sleep(600)", seconds=3.0)
    assert step.reward == 1.0 and "ended after its 3 s" in step.info["reason"]


def test_a_rollout_of_a_task(made: Path) -> None:
    """Its process, the gateway and the policy take part."""
    row = row_of(made, "reversed")
    spec = EnvironmentSpec("harbor", options(made))
    sample = sample_of(spec, row["prompt"][0]["content"], ["pu-level"], harbor=row["harbor"])
    assert reward_of(sample) == 1.0 and sample.response_text == "pu-level"


def test_what_an_agent_sees(made: Path) -> None:
    """The files of the working folder, the image's variables, and neither tests nor solutions."""
    code = """
seen = [os.getcwd(), sorted(os.listdir()), sorted(os.listdir("/logs")), os.environ["LANGUAGE"]]
seen += [os.path.exists(path) for path in ("/tests", "/solution", "/logs/verifier/reward.txt")]
sys.exit(repr(seen))
"""
    reason = ran(made, code).info["reason"]
    folders = ["agent", "artifacts", "verifier"]
    assert str(["/app", ["answer.txt", "word.txt"], folders, "none", False, False, False]) in reason


CHEATS = {
    "writes the reward": "for end in ('txt', 'json'): open(f'/logs/verifier/reward.{end}', 'w').write('1')",
    "leaves a link to the answer": "os.unlink('answer.txt'); os.symlink('/tests/expected.txt', 'answer.txt')",
    "leaves a process": """
import time
if os.fork() == 0:
    os.setsid()
    while True:
        for path in ('/logs/verifier/reward.txt', 'answer.txt'):
            try: open(path, 'w').write('1')
            except OSError: pass
""",
    "leaves an artifact that is a reward": "open('/logs/artifacts/reward.txt', 'w').write('1')",
    "replaces programs of the verifier": """
for folder in ('/bin', '/usr/bin', '/tests', '/etc'):
    try: open(folder + '/cat', 'w').write('')
    except OSError: pass
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_earn_nothing_from_harbor(name: str, made: Path) -> None:
    assert ran(made, CHEATS[name], reply="other").reward == 0.0


def test_files_that_the_agent_deleted_are_missing_in_the_grade(copy: Path) -> None:
    """The image's links and folders stay."""
    work = copy / "tasks/reversed/work"
    (work / "empty").mkdir()
    (work / "link").symlink_to("word.txt")
    test = "echo $(ls -d *) >&2; cat link >&2; exit 1"
    (copy / "tasks/reversed/tests/test.sh").write_text(
        f"#!/bin/sh\n[ -e answer.txt ] || echo 0 > /logs/verifier/reward.txt\n{test}\n"
    )
    step = ran(copy, "open('more', 'w').close(); os.unlink('word.txt'); open('word.txt', 'w').write('new')")
    assert step.reward == 0.0
    assert "answer.txt empty link more word.txt\\nnew" in step.info["reason"]


def test_a_separate_verifier_gets_the_artifacts_alone(made: Path) -> None:
    both = "os.mkdir('out'); open('out/1', 'w').write('one\\n'); open('out/2', 'w').write('two\\n')\n"
    assert ran(made, both, name="fraction").reward == 1.0
    assert ran(made, both + "os.unlink('out/2')", name="fraction").reward == 0.5
    assert ran(made, both + "open('words', 'w').close(); open('/tmp/x', 'w')", name="fraction").reward == 1.0


def test_an_agent_whose_files_stop_the_verifier_earns_nothing(copy: Path) -> None:
    """The verifier gives a reward on the untouched task, so it is not to blame."""
    test = copy / "tasks/reversed/tests/test.sh"
    test.write_text(test.read_text().replace("reward=0\n", "reward=0\n[ -e run.sh ] && . ./run.sh\n", 1))
    for code, reason in (
        ("exit 0", "no reward in /logs/verifier; the verifier: status 0"),
        ("kill -9 $$", "status 137"),
        ("sleep 600", "ended after its 3 s"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 600", "ended after its 3 s"),
        ("rm -r /logs/verifier", "no reward in"),
        ("echo nan > /logs/verifier/reward.txt; exit", "no reward in"),
    ):
        step = ran(copy, f"open('run.sh', 'w').write('{code}\\n')", verifier_seconds=3.0)
        assert step.reward == 0.0 and reason in step.info["reason"], code


@pytest.mark.parametrize("line", ["exit 0", "sleep 600", "echo none > /logs/verifier/reward.txt; exit"])
def test_a_verifier_that_never_gives_a_reward_is_no_reward(line: str, copy: Path) -> None:
    (copy / "tasks/reversed/tests/test.sh").write_text(f"#!/bin/sh\n{line}\n")
    with pytest.raises(Unreachable, match="the verifier of the task 'reversed' gives no reward"):
        ran(copy, verifier_seconds=2.0)


def test_too_much_to_keep_is_an_agents_fault(made: Path) -> None:
    step = ran(made, "for n in range(10_001): open(str(n), 'w').close()", sandbox=USR | {"disk_mib": 128})
    assert step.reward == 0.0 and "the files to keep" in step.info["reason"]


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": " 0.25\n"}, 0.25),
        ({"reward.txt": "0", "reward.json": "1"}, 1.0),
        ({"reward.json": '{"reward": 0.5, "style": 1}'}, 0.5),
        ({"reward.json": '{"accuracy": 2}'}, 2.0),
        ({"reward.json": '{"accuracy": 2, "style": 1}'}, None),
        ({"reward.json": "[1]"}, None),
        ({"reward.json": "NaN"}, None),
        ({"reward.json": "1e999"}, None),
        ({"reward.json": "[" * 100_000}, None),
        ({"reward.txt": "", "reward.json": ""}, None),
        ({"reward.txt": "1" * 5000}, None),
        ({"reward.txt": "inf"}, None),
        ({}, None),
    ],
)
def test_rewards_of_verifiers(files: Mapping[str, str], reward: float | None) -> None:
    written = {f"verifier/{name}": WorkFile(text.encode()) for name, text in files.items()}
    assert read_reward(written) == reward


def test_what_is_missing_is_reported_at_the_start(made: Path, tmp_path: Path) -> None:
    Harbor.prepare(**options(made))
    assert Harbor.about.startswith("bubblewrap: ")
    faults: list[tuple[dict[str, Any], str]] = [
        ({"folder": str(tmp_path)}, "rows.jsonl is no file of tasks"),
        ({"command": ["no-such-command"]}, "no command 'no-such-command'"),
        ({"sandbox": {"kind": "no-such-kind"}}, "choose one of"),
        ({"sandbox": USR | {"mounts": {"/no/such": "/x"}}}, "not an absolute path"),
        ({"sandbox": {"disk_mib": 1}}, "disk_mib"),
    ]
    for changes, reason in faults:
        with pytest.raises(ValueError, match=reason):
            Harbor.prepare(**(options(made) | changes))


PROVIDER = """
from mrl.agents.sandboxes.providers import open_sandbox

class Mine:
    def open(self, *, limits, **others):
        with open({log!r}, "a") as log:
            print(limits.life_seconds, file=log)
        return open_sandbox(limits=limits, **others)
"""


def test_the_life_of_a_sandbox_is_bounded(made: Path, tmp_path: Path) -> None:
    """The agent's of 60 s and the verifier's of 20, with 30 to boot and 300 for files."""
    (tmp_path / "provider.py").write_text(PROVIDER.format(log=str(tmp_path / "log")))
    sandbox = USR | {"kind": f"{tmp_path}/provider.py:Mine", "disk_mib": 32, "boot_seconds": 30}
    assert ran(made, sandbox=sandbox, seconds=60.0, verifier_seconds=20.0).reward == 1.0
    assert (tmp_path / "log").read_text().split() == ["390.0", "350.0"]


def test_a_disk_that_is_too_small_for_the_task_is_no_agents_fault(copy: Path) -> None:
    (copy / "tasks/reversed/work/large").write_bytes(bytes(9 << 20))
    with pytest.raises(ConfigError, match=r"'reversed' needs a larger sandbox\.disk_mib"):
        ran(copy, sandbox=USR | {"disk_mib": 8})
