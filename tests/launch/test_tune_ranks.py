"""`mrl tune` as users run it: ranks meet in private, finish their step on a stop request, end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from mrl.config.load import load
from mrl.launch.workers.spmd import STORE, run_local_ranks
from tests.launch.command import Command
from tests.support.listeners import is_private, listeners

ROOT = Path(__file__).parents[2]
STRANGER = """
import json, os, sys
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
found = []
for path in sys.argv[1:]:
    try:
        found.append(repr(open(path, "ab")))
    except Exception as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
RANK = """
import os, signal, sys, time, tokenize
from pathlib import Path
folder, ends = Path(sys.argv[1]), sys.argv[2]
(folder / os.environ["RANK"]).write_text(f"{os.getpid()} {os.environ['MRL_RANKS_STORE']}")
if os.environ["RANK"] == "0":
    time.sleep(0 if ends == "well" else 600)
elif ends == "by a signal":
    os.kill(os.getpid(), signal.SIGKILL)
elif ends == "with a code":
    sys.exit(3)
"""


@pytest.mark.parametrize(("ends", "code"), [("well", 0), ("with a code", 3), ("by a signal", 137)])
def test_ranks_end_together_with_the_code_of_the_one_that_failed(ends, code, tmp_path, monkeypatch) -> None:
    (tmp_path / "rank_that_ends.py").write_text(RANK)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "token.py").write_text("raise ImportError('taken for the one of Python')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = load([ROOT / "configs/quickstart.yaml"], [])
    looks: list[int] = []
    words = [str(tmp_path), ends]
    assert run_local_ranks("rank_that_ends", words, config, while_they_run=lambda: looks.append(1)) == code
    started = [path.read_text().split(" ", 1) for path in tmp_path.glob("[01]")]
    assert started and not any(psutil.pid_exists(int(pid)) for pid, _ in started)
    assert not any(Path(store).parent.exists() for _, store in started)


@pytest.mark.integration
@pytest.mark.parametrize("ends", ["told", "killed"])
def test_ranks_meet_where_nobody_else_gets_to_and_finish_their_step(
    ends: str, task: Path, tmp_path: Path
) -> None:
    """Ranks also finish their step if their parent process is killed."""
    words = [
        str(ROOT / "configs/quickstart.yaml"),
        f"run={{name: run, folder: {tmp_path}}}",
        f"model={{path: {task}/model, max_length: 32}}",
        f"tune={{data: {{train: {task}/sft.jsonl}}, output: {tmp_path}/out, steps: 100000}}",
        "tune.optimizer.lr=1e-4",
    ]
    with Command("tune", *words, log=tmp_path / "log", under=["setsid"], alone=True) as command:
        command.wait_for("/100000  loss ", seconds=400)
        ranks = command.family()
        assert len(ranks) == 2, ranks
        heard = listeners([psutil.Process(command.process.pid), *ranks])
        assert heard and all(map(is_private, heard)), heard
        (store,) = {process.environ()[STORE] for process in ranks}
        stranger = [sys.executable, "-c", STRANGER, store]
        answer = json.loads(subprocess.run(stranger, capture_output=True, timeout=60, check=True).stdout)
        assert os.getuid() or answer == ["PermissionError"], answer
        os.killpg(command.process.pid, signal.SIGTERM if ends == "told" else signal.SIGKILL)
        assert command.wait(seconds=200) == (128 + signal.SIGTERM if ends == "told" else -signal.SIGKILL)
        command.assert_nothing_left()
    assert not Path(store).parent.exists()
    assert "saved" in command.output.splitlines()[-1], command.output
    strangers = [line for line in command.output.splitlines() if not line.startswith(("tune", "SIGTERM"))]
    assert not strangers, f"lines that are not ours: {strangers[:5]}"
    assert all((tmp_path / f"run/tune/logs/rank-{rank}.log").stat().st_size for rank in range(2))
    assert list((tmp_path / "run/tune/checkpoints").iterdir())
