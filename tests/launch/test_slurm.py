"""The batch file under a real two-node Slurm: it trains, requeues on USR1 and resumes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.local_slurm import LocalSlurm, local_slurm, missing
from tests.launch.two_nodes import ROOT, free_port_base, steps_done, write_run

pytestmark = pytest.mark.integration
SECONDS = 540.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    if lacking := missing():
        if os.geteuid() == 0:
            pytest.fail("the Slurm tests need " + ", ".join(lacking) + "; run `make system-packages`")
        pytest.skip("the Slurm tests need " + ", ".join(lacking))
    with local_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(slurm: LocalSlurm, folder: Path, config: Path, *words: str, nodes: str = "2") -> str:
    """Submit the batch file to `nodes` nodes and return the job number."""
    settings = {
        "MRL_HOME": str(ROOT),
        "MRL_PORT_BASE": str(free_port_base()),
        "MRL_LOGS": str(folder / "logs"),
        "OMP_NUM_THREADS": "1",
        "MRL_PYTHON": str(Path(sys.prefix) / "bin" / "python"),
    }
    export = ",".join(["ALL", *(f"{name}={value}" for name, value in settings.items())])
    number = slurm.run(
        *("sbatch", "--parsable", f"--nodes={nodes}", "--time=00:20:00", f"--export={export}"),
        *(f"--output={folder}/batch-%j.out", str(ROOT / "slurm" / "qwen3_moe_grpo.sh"), str(config), *words),
    )
    return number.split(";")[0]


def output(folder: Path, number: str) -> str:
    path = folder / f"batch-{number}.out"
    return path.read_text(errors="replace") if path.is_file() else "(no output)"


def start_again(slurm: LocalSlurm, number: str) -> None:
    """Shorten Slurm's two-minute wait before a requeue to 15 s; 0 s would revoke the credential."""

    def accepted() -> bool:
        if slurm.job(number)["JobState"] != "PENDING":
            return False
        with contextlib.suppress(AssertionError):  # between two states the controller refuses
            slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now+15seconds")
            return True
        return False

    slurm.wait_until(accepted, 240, "a pending job")


def ray_processes(slurm: LocalSlurm, number: str) -> list[str]:
    """Return command lines of Ray processes that a job of this Slurm left on this machine."""
    left, conf = [], slurm.environment["SLURM_CONF"]
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.info["cmdline"] or [])
            environment = process.environ() if "ray" in words else {}
            if environment.get("SLURM_JOB_ID") == number and environment.get("SLURM_CONF", conf) == conf:
                left.append(words[:200])
    return left


def wait_for_end(slurm: LocalSlurm, folder: Path, number: str) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    try:
        slurm.wait_until(lambda: slurm.job(number)["JobState"] in ended, SECONDS, f"the end of job {number}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{output(folder, number)[-6000:]}") from None
    return slurm.job(number)


POOLS = (
    "training.layout={ep: 1, dp: 1}", "launch.engine_slots=1", "loop.max_rollout_mismatch=1e-4",
    f"reward={{kind: plugin, style: verl, path: {Path(__file__).parent}/rewards.py:even_digits}}",
)  # fmt: skip
"""Trainer on one node, engine on the other; rewards vary, because a run without variation exits with 4."""


@pytest.mark.long
def test_a_warned_job_on_two_nodes_saves_requeues_resumes_and_completes(slurm, tmp_path) -> None:
    number = submit(slurm, tmp_path, write_run(tmp_path, steps=16), *POOLS)
    saved = warned(slurm, tmp_path, number)
    job = wait_for_end(slurm, tmp_path, number)
    text = output(tmp_path, number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text[-6000:]
    assert "on 2 nodes: n[1-2]" in text and "leaving with code 99" in text, text[-6000:]
    assert "1 trainer ranks and 1 engines on 1 slots of their own" in text
    assert f"resuming at step {saved + 1}" in text, text[-6000:]
    assert steps_done(tmp_path) == list(range(1, 17)) and saved < 16
    logs = tmp_path / "logs" / f"qwen3-moe-grpo-{number}"
    assert (logs / "latest").resolve() == (logs / "attempt-1").resolve()
    for attempt in ("attempt-0", "attempt-1"):
        assert "Ray node 0 is up" in (logs / attempt / "node-0.log").read_text()
        assert "Ray node 1 is up" in (logs / attempt / "node-1.log").read_text()
    assert ray_processes(slurm, number) == []


def warned(slurm: LocalSlurm, folder: Path, number: str) -> int:
    """Warn a job after its first step, restart it soon, and return the last step done."""
    slurm.wait_until(lambda: steps_done(folder) != [], SECONDS, "the first step")
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] == "1", SECONDS, "the requeue")
    saved = steps_done(folder)
    start_again(slurm, number)
    return saved[-1]


@pytest.mark.slow
def test_a_job_whose_node_has_died_goes_on_with_the_other(slurm: LocalSlurm, tmp_path: Path) -> None:
    """Mark the node as down, as after SlurmdTimeout: the job is requeued. Draining keeps the node out."""
    elastic = "launch.elastic=[[training.layout.dp=1,training.layout.ep=1]]"
    words = ("loop.steps=400", "loop.checkpoint.every_steps=1", elastic)
    number = submit(slurm, tmp_path, write_run(tmp_path), *words, nodes="1-2")
    slurm.wait_until(lambda: len(steps_done(tmp_path)) > 1, SECONDS, "two steps")
    for state in ("DOWN", "DRAIN"):
        slurm.run("scontrol", "update", "NodeName=n2", f"State={state}", "Reason=power")
    try:
        slurm.wait_until(lambda: slurm.job(number)["Restarts"] == "1", SECONDS, "the requeue")
        saved = len(steps_done(tmp_path))
        start_again(slurm, number)
        slurm.wait_until(lambda: len(steps_done(tmp_path)) > saved, SECONDS, "a step after the requeue")
        slurm.run("scancel", "--batch", "--signal=TERM", number)
        wait_for_end(slurm, tmp_path, number)
    finally:
        slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    text = output(tmp_path, number)
    assert "1 of 2 slots available: continuing with training.layout.dp=1" in text, text[-6000:]
    assert "resuming at step" in text, text[-6000:]
    done = steps_done(tmp_path)
    assert done == list(range(1, len(done) + 1))
    assert ray_processes(slurm, number) == []


def test_a_bad_configuration_is_not_queued_again(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = submit(slurm, tmp_path, write_run(tmp_path), "loop.stepz=3")
    job = wait_for_end(slurm, tmp_path, number)
    text = output(tmp_path, number)
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] == "2:0"
    assert job["Restarts"] == "0"
    assert "did you mean 'steps'" in text


def test_the_batch_file_is_clean() -> None:
    scripts = sorted(map(str, (ROOT / "slurm").glob("*.sh")))
    assert scripts
    for command in (["bash", "-n"], ["shellcheck"]):
        done = subprocess.run([*command, *scripts], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
