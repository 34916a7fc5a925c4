"""The Ray that a run starts on its machine has what it uses; one that does not come up is one of our errors, and leaves nothing."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import asked_again, cluster, session_folder


def test_a_ray_that_does_not_start_says_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for an object store below the least that Ray takes, past the section's own bound."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    launch = LaunchSection.model_construct(object_store_bytes=1000)
    with (
        pytest.raises(WorkerLost, match=r"Ray did not start on this machine: .*wait for them"),
        cluster(launch, num_slots=1),
    ):
        pass
    assert not os.listdir(tmp_path)


def test_a_node_that_is_not_there_yet_is_asked_for_again() -> None:
    """Until the time is over, or it will not come any more; what it says then is the error."""
    answers = iter([False, False, True])

    def ask(*, number: int) -> int:
        if next(answers, False):
            return number
        raise RuntimeError("not there")

    assert asked_again(ask, 60.0, lambda: True)(number=7) == 7
    for seconds, lives in ((0.0, True), (3600.0, False)):
        with pytest.raises(RuntimeError, match="not there"):
            asked_again(ask, seconds, lambda lives=lives: lives)(number=7)


@pytest.mark.integration
def test_the_processes_of_a_run_s_ray_are_those_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dashboard, no reader of logs, no autoscaler, and an agent that does not look for a dashboard."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {*psutil.Process().children()}  # of the tests that this process had; they may fork meanwhile
    with cluster(LaunchSection(), num_slots=1):
        from ray._private.worker import _global_node

        assert _global_node is not None
        tops = {*psutil.Process().children()} - before
        started = [each for top in tops for each in (top, *top.children(recursive=True))]
        commands = [" ".join(process.cmdline()) for process in started]
        log = Path(_global_node.get_logs_dir_path()) / "dashboard_agent.log"
        deadline = time.monotonic() + 60
        while "Loaded " not in (said := log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
    names = ("session_watcher", "gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent")
    unexpected = [command for command in commands if not any(name in command for name in names)]
    assert not unexpected and len(commands) == len(names), commands
    assert "Loaded 0 modules" in said, said


@pytest.mark.integration
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_run_whose_ray_loses_a_process_says_so_at_its_next_look(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which Ray ends a minute later."""
    program = f"""
import psutil, time
from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster
with cluster(LaunchSection(), num_slots=1) as ray:
    ray.require("update")
    next(each for each in psutil.Process().children() if each.name() == {name!r}).kill()
    time.sleep(1.5)
    try:
        ray.require("update")
    except WorkerLost as error:
        print(error, flush=True)
"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert f"Ray's {name} of this node died in phase update" in done.stdout, done.stderr


def watchers(folder: Path) -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one that has ended and is not waited for yet
            found += [each] if str(folder) in " ".join(each.cmdline()) else []
    return found


def until(condition: Callable[[], bool]) -> bool:
    """Asks six hundred times: a machine that stands still for a while costs one answer, however late its clock then is."""
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_watcher_that_dies_has_a_successor(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the machine has no process left for it at first."""
    with session_folder() as folder:
        (first,) = watchers(folder)
        refused = [BlockingIOError("no process left")]
        started = subprocess.Popen

        def popen(*words: Any, **options: Any) -> Any:
            if refused:
                raise refused.pop()
            return started(*words, **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        first.kill()
        keepers = [each for each in threading.enumerate() if each.name == "watcher"]
        # One look at a time: of two, the first could see the watcher that ended and the second nobody.
        assert until(lambda: watchers(folder) not in ([], [first])), (keepers, refused)
        assert not refused
    assert not folder.exists() and not watchers(folder)
    assert not capfd.readouterr().err, "whoever closes is not spoken for"
