"""Commands in sandboxes as programs: what they see, how they are graded, and who is to blame."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.environment import Step
from mrl.agents.environment_client import EnvironmentClient
from mrl.agents.envs import command_program
from mrl.agents.envs.command_program import BootSlots, CommandProgram
from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentWorkers
from mrl.config.sections.agent import AgentSection
from mrl.config.sections.programs import ProgramSection
from mrl.errors import ConfigError
from mrl.gateway.server import Gateway
from mrl.gateway.templates import Templates
from mrl.rewards.kinds.environment_return import return_of
from mrl.rollout.request import GenerationRequest
from mrl.samples import Prompt, Sample, Status
from mrl.trajectories.program_rollout import ProgramRules, program_rollout
from mrl.trajectories.trajectory import Trajectory
from tests.support import chat_tokenizers
from tests.support.sandbox_probes import answering
from tests.support.sandbox_server import serving
from tests.support.scripted_policy import ScriptedPolicy

ASK = """
import json, os, sys, urllib.request

def ask(text):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]})
    with urllib.request.urlopen(request, body.encode(), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

task = json.load(open(os.environ["MRL_TASK"]))
reply = ask(sys.argv[1])
open("answer.txt", "w").write(reply)
"""
CHECK = """
import json, os, sys
task = json.load(open(os.environ["MRL_TASK"]))
if "OPENAI_API_KEY" in os.environ: sys.exit("the grade has a model")
if any(line.split()[3] == "0A" for line in open("/proc/net/tcp")): sys.exit("the grade has a door")
if not os.path.exists("answer.txt"): sys.exit("no answer")
if "number" in task: open("/tmp/reward", "w").write(task["number"])
sys.exit(open("answer.txt").read() != task["answer"])
"""
AGENT: dict[str, Any] = {
    "command": ["python3", "agent.py", "Q: {question}"],
    "columns": ["prompt", "question"],
    "sandbox": {"disk_mib": 16, "boot_seconds": 30},
    "seconds": 60,
}
GRADE = {"command": ["python3", "check.py"], "keep": ["answer.txt", "solution/*"], "seconds": 60}


class World:
    """Folders of a program and of its grade, and a policy that says "turn N"."""

    def __init__(self, folder: Path) -> None:
        self.files, self.hidden = folder / "files", folder / "hidden"
        self.files.mkdir()
        self.hidden.mkdir()
        (self.hidden / "check.py").write_text(CHECK)

    def section(self, *, grade: Mapping[str, Any] | None = GRADE, **changes: Any) -> AgentSection:
        program: dict[str, Any] = AGENT | {"files": str(self.files)} | changes
        if grade is not None:
            program["grade"] = {"files": str(self.hidden), **grade}
        return AgentSection(program=ProgramSection(**program), memory_mib=512, run_seconds=300)

    def ran(self, code: str = "", *, section: AgentSection | None = None, **task: Any) -> Step:
        """Run a program that asks once and then runs `code`, without a rollout; return its end."""
        (self.files / "agent.py").write_text(ASK + code)
        options = (section or self.section()).environments()["program"].options
        command_program._folder.cache_clear()
        with answering("turn 0") as model:
            columns = {"prompt": "?", "question": "why?", "answer": "turn 0", **task}
            return CommandProgram(**options).run(columns, 7, model)

    def rolled_out(
        self,
        code: str = "",
        *,
        section: AgentSection | None = None,
        before: Callable[[], None] = lambda: None,
        about: str = "bubblewrap: ",
        **task: Any,
    ) -> Sample:
        """Run a program that asks once and then runs `code`; return its sample. `before`: called between the
        check at the start and the run. `about`: begin of the sandbox's description."""
        (self.files / "agent.py").write_text(ASK + code)
        section = section or self.section()
        tokenizer, numbers = chat_tokenizers.qwen(), iter(range(100))
        policy = ScriptedPolicy(tokenizer, lambda context: f"turn {next(numbers)}")
        limits = Limits(max_turns=4, max_context=1500, max_tokens=1500, max_turn_tokens=50)
        rules = ProgramRules("program", Templates(tokenizer), limits, 1)
        columns = {"question": "why?", "answer": "turn 0", **task}
        prompt = Prompt(5, np.array([1], np.int32), "?", None, metadata=columns)
        self.trajectory = Trajectory.of(prompt, 0)
        request = GenerationRequest(self.trajectory.name, prompt.tokens, 0, 1)

        async def roll() -> None:
            with EnvironmentWorkers.of(section) as pool:
                description = pool.describe("program")
                assert description.runs and description.about.startswith(about)
                before()
                client = EnvironmentClient(pool)
                await program_rollout(policy, client, Gateway(), rules, self.trajectory, request, 7)

        asyncio.run(asyncio.wait_for(roll(), 120))
        assert self.trajectory.sample is not None
        self.prompts = [tokenizer.decode(request.prompt_tokens.tolist()) for request in policy.requests]
        return self.trajectory.sample


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def reason_of(sample: Sample) -> str:
    assert sample.transcript is not None
    return sample.transcript.reason


def test_a_command_is_scored_by_its_grade(world: World) -> None:
    sample = world.rolled_out()
    assert sample.status is Status.FINISHED and sample.response_text == "turn 0"
    verdict = return_of(sample)
    assert verdict is not None and (verdict.value, reason_of(sample)) == (1.0, "")
    assert "Q: why?" in world.prompts[0]
    sample = world.rolled_out("sys.exit(3)", answer="another")
    verdict = return_of(sample)
    assert verdict is not None and (verdict.value, world.trajectory.faults) == (0.0, 0)
    assert "the program: status 3" in reason_of(sample) and "the grade: status 1" in reason_of(sample)


def test_a_command_that_does_not_find_the_policy_is_named_with_its_end(world: World) -> None:
    section = world.section(command=["sh", "-c", "echo no model here; exit 3"])
    with pytest.raises(ConfigError, match=r"program: .*status 3: 'no model here'.* OPENAI_BASE_URL"):
        world.rolled_out(section=section)


def test_a_grade_may_write_a_number(world: World) -> None:
    section = world.section(grade=GRADE | {"reward": "number"})
    assert world.ran(section=section, number="0.25").reward == 0.25
    assert world.ran(section=section, number="0.25", answer="another").reward == 0.0
    for tasks in ({"number": "nan"}, {"number": "x"}, {}):
        assert world.ran(section=section, **tasks).reward == 0.0
    assert world.ran(number="0.25").reward == 1.0, "the status alone counts"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(3)", "the program: status 3"),
        ("os.kill(os.getpid(), 9)", "the program: status 137"),
        ("x = bytearray(2**30)", "MemoryError"),
        ("import time; time.sleep(600)", "the program: ended after its "),
        ("os.unlink('answer.txt')", "no answer"),
    ],
)
def test_what_a_program_does_is_graded(code: str, reason: str, world: World) -> None:
    section = world.section(seconds=5 if "sleep" in code else 60)
    step = world.ran(code, section=section)
    assert reason in step.info["reason"]
    assert step.reward == (0.0 if "unlink" in code else 1.0)


def test_rewards_may_come_from_elsewhere(world: World) -> None:
    assert world.ran(section=world.section(grade=None)).reward is None


def test_a_program_sees_neither_answers_nor_tests(world: World) -> None:
    code = """
import subprocess
seen = [set(task) - {"prompt", "question"}, "turn 0" in json.dumps(task)]
names = subprocess.run(["find", "/", "-xdev", "-name", "check.py"], capture_output=True, text=True).stdout
names += subprocess.run(["find", "/work", "/tmp", "-type", "f"], capture_output=True, text=True).stdout
open("answer.txt", "w").write(repr((seen, sorted(names.split()), "answer" in str(os.environ))))
"""
    files = ["/tmp/task.json", "/work/agent.py", "/work/answer.txt"]
    assert world.ran(code, answer=repr(([set(), False], files, False))).reward == 1.0


CHEATS = {
    "replaces the test": "open('check.py', 'w').write('')",
    "makes the test a folder": "os.makedirs('solution'); os.makedirs('check.py/x')",
    "shadows a module": "open('json.py', 'w').write('import os; os._exit(0)')",
    "writes the reward": "open('/tmp/reward', 'w').write('1')",
    "leaves a link": "os.unlink('answer.txt'); os.symlink('/tmp/task.json', 'answer.txt')",
    "leaves a link to a folder": "os.symlink('/tmp', 'solution')",
    "leaves a process": """
import time
if os.fork() == 0:
    os.setsid()
    while True:
        for path in ('check.py', '/tmp/reward'):
            try: open(path, 'w').write('')
            except OSError: pass
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_earn_nothing(name: str, world: World) -> None:
    """The answer is wrong, and everything that a program can write is in `grade.keep`."""
    keep = ["answer.txt"] if name == "shadows a module" else ["*"]
    step = world.ran(CHEATS[name], section=world.section(grade=GRADE | {"keep": keep}), answer="another")
    assert step.reward == 0.0 and "the grade: status 1" in step.info["reason"]


def test_too_much_to_keep_is_scored(world: World) -> None:
    """A program cannot avoid its score by what it leaves."""
    code = "os.mkdir('solution')\nfor n in range(10_001): open(f'solution/{n}', 'w').close()"
    step = world.ran(code, section=world.section(sandbox={"disk_mib": 128}))
    assert step.reward == 0.0 and "the files to keep" in step.info["reason"]
    (world.hidden / "filling").write_bytes(bytes(15 << 20))
    step = world.ran("os.mkdir('solution'); open('solution/x', 'wb').write(bytes(2 << 20))")
    assert step.reward == 0.0 and "do not fit" in step.info["reason"]


def test_the_program_decides_only_about_files_to_keep(world: World) -> None:
    (world.files / "solution").mkdir()
    (world.files / "solution/old").write_text("1")
    (world.files / "other").write_text("1")
    (world.hidden / "check.py").write_text(
        'import os; exit(f\'{sorted(os.listdir())} {os.listdir("solution")} {open("other").read()}\')'
    )
    code = """
os.unlink('solution/old')
open('solution/new', 'w').close()
open('other', 'w').write('2')
open('more', 'w').close()
"""
    left = ["agent.py", "answer.txt", "check.py", "other", "solution"]
    assert f"{left} ['new'] 1" in world.ran(code).info["reason"]


def test_a_lost_sandbox_is_never_scored(world: World, tmp_path: Path) -> None:
    """The file system of a mount goes away during the run."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    section = world.section(sandbox={"mounts": {str(mounted): "/mounted"}, "disk_mib": 16})
    sample = world.rolled_out(section=section, before=mounted.rmdir)
    assert (sample.status, sample.has_reward, world.trajectory.faults) == (Status.FAILED, False, 1)
    assert "mounted" in reason_of(sample)


def test_what_cannot_run_is_refused_at_the_start(world: World) -> None:
    (world.files / "agent.py").write_text("")
    for section, reason in (
        (world.section(command=["no-such-command"]), "no command 'no-such-command'"),
        (world.section(command=["python3", "{unknown}"]), r"names \{unknown\}"),
        (world.section(files="/no/such"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason), EnvironmentWorkers.of(section) as pool:
            pool.describe("program")
    with pytest.raises(ValueError, match=r"agent.run_seconds = 300"):
        world.section(seconds=280)
    for place in ("/work/x", "relative", "/tmp"):
        with pytest.raises(ValueError, match="cannot mount a folder"):
            world.section(sandbox={"mounts": {"/usr": place}})
    with pytest.raises(ValueError, match=r"agent.memory_mib = 100 is too little"):
        AgentSection(program=ProgramSection(**AGENT), memory_mib=100)
    with pytest.raises(ValueError, match="program replaces"):
        AgentSection(environment="calculator", program=ProgramSection(**AGENT))


PROVIDER = """
from mrl.agents.sandboxes.providers import open_sandbox
class Mine:
    def __init__(self, log):
        self._log = log
    def open(self, *, image, mounts, limits, model):
        with open(self._log, "a") as log:
            print(image, mounts, limits.life_seconds, model is not None, file=log)
        return open_sandbox(limits=limits, model=model)
"""


def test_a_provider_of_ones_own_is_named_by_its_path(world: World, tmp_path: Path) -> None:
    file, log = tmp_path / "provider.py", tmp_path / "log"
    file.write_text(PROVIDER)
    sandbox = {"kind": f"{file}:Mine", "image": "any", "options": {"log": str(log)}, "boot_seconds": 30}
    verdict = return_of(world.rolled_out(section=world.section(sandbox=sandbox)))
    assert verdict is not None and verdict.value == 1.0
    lines = log.read_text().splitlines()
    assert lines == [
        f"any {{}} {life} {model}" for life, model in ((450.0, False), (390.0, True), (390.0, False))
    ]
    for change, reason in (
        ({"kind": f"{file}:Yours"}, r"sandbox\.kind = .* has no class 'Yours'; it has \['Mine'\]"),
        ({"options": {"unknown": 1}}, r"sandbox\.options of .*:Mine"),
    ):
        section = world.section(sandbox=sandbox | change)
        with pytest.raises(ConfigError, match=reason), EnvironmentWorkers.of(section) as pool:
            pool.describe("program")


def test_programs_run_on_other_machines(world: World, tmp_path: Path) -> None:
    """The policy is reached through the sandbox's own connection, and the grade is in a fresh one."""
    with serving(tmp_path) as server:
        sandbox = {"kind": "remote", "options": server.options, "boot_seconds": 30}
        section = world.section(sandbox=sandbox)
        sample = world.rolled_out(section=section, about=server.url)
        verdict = return_of(sample)
        assert verdict is not None and (verdict.value, reason_of(sample)) == (1.0, "")
        assert "Q: why?" in world.prompts[0]
        assert "no answer" in world.ran("os.unlink('answer.txt')", section=section).info["reason"]

        def kill() -> None:
            server.process.kill()
            server.process.wait()

        sample = world.rolled_out(section=section, before=kill, about=server.url)
        assert (sample.status, sample.has_reward, world.trajectory.faults) == (Status.FAILED, False, 1)


def test_texts_of_commands(world: World) -> None:
    filled = command_program._filled("a {x} ${HOME} {y}", {"x": "1", "y": "{x}"}, "s")
    assert filled == "a 1 ${HOME} {x}", "what a row says names no further columns"
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
    assert command_program._text(messages) == "one\n\ntwo"
    assert command_program._text({"a": [1]}) == '{"a": [1]}'


def test_files_of_rows_stay_in_their_folder(world: World) -> None:
    (world.files / "one").mkdir()
    (world.files / "one/x").write_text("1")
    path = f"{world.files}/{{task}}"
    assert set(command_program._files_of(path, {"task": "one"})) == {"x"}
    with pytest.raises(ConfigError, match="outside their folder"):
        command_program._files_of(path, {"task": "one/../../hidden"})


def _boot(slots: BootSlots, places: Any) -> None:
    with slots.taken():
        places.put(os.getpid())
        time.sleep(600)


def test_boots_are_bounded() -> None:
    """Among forked processes; one that is killed gives its slot back."""
    slots, context = BootSlots(2), multiprocessing.get_context("fork")
    places = context.SimpleQueue()
    boots = [context.Process(target=_boot, args=(slots, places)) for _ in range(3)]
    for boot in boots:
        boot.start()
    try:
        first = {places.get(), places.get()}
        time.sleep(0.3)
        assert places.empty()
        os.kill(min(first), signal.SIGKILL)
        assert places.get() not in first
    finally:
        for boot in boots:
            boot.kill()
            boot.join()
