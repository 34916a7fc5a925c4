"""kill -9 in every phase: found soon, named with its phase in one line, nothing left, and the next start resumes.

Each start resumes what the death before it left, and is then killed itself, by fault injection (launch/commands/fault_injection.py), whose record
says which process it killed and in which phase.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.observe.metrics_log import read, without_volatile
from mrl.observe.phases import PHASES
from mrl.report.audit import audit, text
from tests.launch.command import Command
from tests.launch.tiny_runs import words

pytestmark = pytest.mark.integration

NO_VALIDATION = "loop.validation={every_steps: 0, before_training: false, after_training: false}"
NAMES = {
    "train-1": "trainer rank 1 died in phase",
    "engine-0": "engine 0 died in phase",
    "vllm-0": "engine 0 died in phase",
}


class Chain:
    """Starts of one run, one after the other, each with its faults."""

    def __init__(self, task: Path, folder: Path) -> None:
        self.folder, self._starts = folder, 0
        self.run_folder = folder / "run"
        # Names of sockets are limited, so the folder for temporary files is not below pytest's.
        self.temporary = Path(tempfile.mkdtemp(prefix="k-"))
        self._words = words(
            task,
            folder,
            "run",
            "training.layout={tp: 1, pp: 2, ep: 1, dp: 1}",
            "rollout.tp=2",
            "loop.deterministic=true",
            "loop.phase_deadline_seconds=240",
            "loop.checkpoint={every_steps: 1}",
            "launch.object_store_bytes=83886080",
            NO_VALIDATION,
        )

    def start(self, *words: str, fault: str = "") -> Command:
        self._starts += 1
        environment = {"TMPDIR": str(self.temporary), "MRL_FAULT": fault}
        log = self.folder / f"start-{self._starts}.log"
        return Command("train", *self._words, *words, log=log, environment=environment)

    def finish(self, *words: str, fault: str = "") -> str:
        """A start that must end well; its output."""
        command = self.start(*words, fault=fault)
        try:
            assert command.wait(seconds=400) == 0, command.output[-3000:]
            self.assert_nothing_left(command)
            found = audit(self.run_folder)
            assert found.holds and found.attempts == self._starts, text(found)
            return command.output
        finally:
            command.end()

    def killed(self, phase: str, target: str) -> None:
        """A start whose target dies in the phase of its second step: all the outcomes that are promised for it."""
        before = self.steps_saved()
        command = self.start("loop.steps=1000", fault=f"{phase}:{target}:2")
        try:
            code = command.wait(seconds=400)
            record = self.injected()[-1]
            detection = time.time() - record["time"]
            assert (record["phase"], record["during"], record["target"]) == (phase, phase, target)
            assert detection < 180, f"the end of {target} took {detection:.0f} s to end the run"
            if target == "driver":
                assert code == -signal.SIGKILL, command.output[-3000:]
            else:
                assert code == 1, command.output[-3000:]
                self.assert_named(command.output, phase, target)
            self.assert_nothing_left(command)
        finally:
            command.end()
        assert (f"resuming at step {before + 1}" in command.output) == (before > 0)
        assert self.steps_saved() >= before + 1, "the start saved nothing before it was killed"

    def assert_named(self, output: str, phase: str, target: str) -> None:
        lines = [line for line in output.splitlines() if line.startswith("mrl: ")]
        assert len(lines) == 1 and f"{NAMES[target]} {phase}" in lines[0], output[-3000:]
        if target == "vllm-0":
            assert re.search(r"engine 0 lost its process VllmWorker", lines[0]), lines[0]

    def assert_nothing_left(self, command: Command) -> None:
        """No process, segment, socket or temporary file within 60 s."""
        deadline = time.monotonic() + command.assert_nothing_left()
        while (left := sorted(os.listdir(self.temporary))) and time.monotonic() < deadline + 60:
            time.sleep(0.2)
        assert not left, f"left in the folder of temporary files: {left}"
        command.assert_no_segment_left()

    def injected(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_folder / "faults.jsonl").read_text().splitlines()]

    def steps_saved(self) -> int:
        folder = self.run_folder / "checkpoints"
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        return max((int(n[5:]) for n in names if re.fullmatch(r"step-\d+", n)), default=0)

    def rows(self) -> list[dict[str, object]]:
        """What may not differ between equal runs; a step that died in its weight sync has no figures of that."""
        rows = [without_volatile(row) for row in read(self.run_folder / "metrics.jsonl")]
        return [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows]


@pytest.fixture
def chain(task: Path, tmp_path: Path) -> Iterator[Chain]:
    made = Chain(task, tmp_path)
    yield made
    shutil.rmtree(made.temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, object]]]:
    """The rows of a run that was left alone."""
    made = Chain(task, tmp_path_factory.mktemp("undisturbed"))
    made.finish("loop.steps=16")
    yield made.rows()
    shutil.rmtree(made.temporary, ignore_errors=True)


def test_every_kind_of_process_killed_in_some_phase(chain: Chain) -> None:
    chain.killed("sync", "vllm-0")
    chain.killed("update", "train-1")
    chain.killed("generate", "engine-0")
    chain.killed("save", "driver")
    last = chain.steps_saved() + 3
    chain.finish(f"loop.steps={last}", fault="reward:reward:2")
    record = chain.injected()[-1]
    assert (record["target"], record["during"]) == ("reward", "reward")
    rows = chain.rows()
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert all(row["reward/no_reward_frac"] == 0 and row["optim/grad_norm"] > 0 for row in rows)
    assert not list(chain.run_folder.glob("checkpoints/*.partial"))


TARGETS = ("driver", "train-1", "engine-0", "vllm-0")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phases", [PHASES[:4], PHASES[4:]], ids="-".join)
@pytest.mark.parametrize("target", TARGETS)
def test_deaths_in_each_phase_change_nothing(
    target: str, phases: tuple[str, ...], chain: Chain, undisturbed: list[dict[str, object]]
) -> None:
    """One death after the other, and then the same rows to the last bit as without them."""
    for phase in phases:
        chain.killed(phase, target)
    last = chain.steps_saved() + 1
    chain.finish(f"loop.steps={last}")
    assert len(chain.rows()) == last and chain.rows() == undisturbed[:last]


@pytest.mark.slow
def test_a_verifier_killed_in_each_phase_is_replaced(chain: Chain) -> None:
    faults = ",".join(f"{phase}:reward:{number}" for number, phase in enumerate(PHASES, start=2))
    chain.finish("loop.steps=11", fault=faults)
    assert [w["during"] for w in chain.injected()] == list(PHASES)
    rows = chain.rows()
    assert len(rows) == 11 and all(row["reward/no_reward_frac"] == 0 for row in rows)


@pytest.mark.slow
def test_a_stopped_rank_is_found_at_the_deadline(chain: Chain) -> None:
    """It looks alive and does nothing: the same outcome as a death, after the deadline of the phase."""
    command = chain.start("loop.steps=1000", "loop.phase_deadline_seconds=20")
    try:
        command.wait_for("step 2/1000", seconds=400)
        command.worker(chain.run_folder / "logs/latest/train-1.log").suspend()
        assert command.wait(seconds=400) == 1, command.output[-3000:]
        chain.assert_nothing_left(command)
    finally:
        command.end()
    assert re.search("trainer rank 1 did not answer within 20 s in phase ", command.output), command.output[
        -2000:
    ]
