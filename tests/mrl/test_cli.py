"""The command line: settings may stand on both sides of an option; unknown words are refused."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from mrl.cli import main

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.yaml")


@pytest.mark.parametrize("order", [("--dry-run", "loop.steps=-7"), ("loop.steps=-7", "--dry-run")])
def test_words_stand_on_both_sides_of_an_option(order, capsys) -> None:
    assert main(["train", QUICKSTART, *order, "model.path=nowhere"]) == 2
    assert "loop.steps: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", QUICKSTART, "--dryly"], ["report", "runs/x", "--textual"]])
def test_unknown_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """As in `mrl settings | head -1`; here nobody reads at all."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mrl.cli", "settings"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=240)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0 and capsys.readouterr().out == f"mrl {version('mrl')}\n"


@pytest.mark.parametrize("words", [["train"], ["rewards", "try"], ["audit"], ["settings"]])
def test_the_help_of_a_command_has_an_example_and_its_exit_codes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and f"example:\n  mrl {' '.join(words)} " in out
    assert "exit codes:\n  0 " in out
