"""Stop requests at any moment."""

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.launch.commands import stopping
from mrl.launch.commands.stopping import REQUEUE_EXIT_CODE, StopSignals
from mrl.launch.commands.train import Run
from tests.support.runs import run_python


def test_a_request_before_the_first_step_that_other_code_swallows_is_not_lost() -> None:
    """A destructor or callback may swallow the exception; it is raised again before the first step."""
    with StopSignals() as signals:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt, match="SIGUSR1"):
            signals.begin_steps()
        assert not signals.stepping
    assert signals.exit_code == REQUEUE_EXIT_CODE


@pytest.mark.parametrize(
    ("apart", "second", "leaves"),
    [(3600.0, signal.SIGTERM, False), (0.0, signal.SIGTERM, True), (3600.0, signal.SIGINT, True)],
)
def test_a_signal_that_comes_twice_at_once_is_one_request(apart, second, leaves, monkeypatch) -> None:
    """`timeout 60 mrl tune ...` signals the command and its group; a later or other signal is a new one."""
    monkeypatch.setattr(stopping, "ONE_REQUEST_SECONDS", apart)
    with StopSignals() as signals:
        signals.begin_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        again = pytest.raises(KeyboardInterrupt, match=f"{second.name} twice")
        with again if leaves else contextlib.nullcontext():
            os.kill(os.getpid(), second)
        assert signals.reason() == "SIGTERM"
    assert signals.exit_code == 128 + signal.SIGTERM


def test_a_reason_in_words_is_no_failure_and_needs_no_main_thread() -> None:
    results: list[tuple[str | None, int]] = []

    def asked() -> None:
        with StopSignals() as signals:
            signals.begin_steps()
            signals.request_stop("enough")
            signals.request_stop("too late")
            results.append((signals.reason(), signals.exit_code))

    handler, thread = signal.getsignal(signal.SIGTERM), threading.Thread(target=asked)
    thread.start()
    thread.join()
    assert results == [("enough", 0)] and signal.getsignal(signal.SIGTERM) is handler


PROGRAM = """
import os, signal
from mrl.launch.commands import stopping
from mrl.launch.commands.stopping import StopSignals

def main():
    try:
        with StopSignals() as signals:
            exec("os.kill(os.getpid(), signal.SIGUSR1)")  # as the import of a dataclass or a named tuple does
    except KeyboardInterrupt:
        return signals.exit_code

raise SystemExit(main())
"""


def test_the_exit_code_holds_where_the_request_came_inside_of_text_that_is_run(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(PROGRAM)
    done = run_python("-m", "leaving", environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == REQUEUE_EXIT_CODE, done


@pytest.mark.parametrize(
    ("largest", "exit_code", "words"), [(0.0, 4, "nothing was learned"), (1.5, 0, "done after step 5")]
)
def test_a_run_that_learned_nothing_says_so_last_and_by_its_exit_code(
    tmp_path: Path, largest: float, exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"kind": "maths"}}
    made = Run(load_config(settings, {"run": {"name": "a", "folder": str(tmp_path)}}))
    made.folder.mkdir()
    rows = [{"step": step, "advantage/abs_max": largest} for step in range(1, 6)]
    (made.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made.ended = "done"
    made._conclude(made.folder / "metrics.jsonl")
    (line,) = capsys.readouterr().out.splitlines()
    assert words in line and made.exit_code == exit_code
