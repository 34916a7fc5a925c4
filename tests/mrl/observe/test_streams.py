"""Output to a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.observe.streams import lossy


def test_a_full_disk_loses_lines_and_raises_nothing(tmp_path: Path) -> None:
    """/dev/full takes nothing; the stream continues once its descriptor leads to a file."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = lossy(descriptor)
    print("lost", file=stream, flush=True)
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, descriptor)
    print("kept", file=stream)
    assert (tmp_path / "log").read_text() == "kept\n"
    os.close(file)
    os.close(descriptor)


def test_other_errors_are_errors() -> None:
    out, into = os.pipe()
    os.close(out)
    stream = lossy(into)
    with pytest.raises(BrokenPipeError):
        print("nobody reads", file=stream)
    os.close(into)


def test_the_process_own_output() -> None:
    code = (
        "import sys; from mrl.observe.streams import survive_full_disks\n"
        "survive_full_disks(); print('out', flush=True); print('err', file=sys.stderr); sys.exit(7)"
    )
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, timeout=240, check=False)
    assert run.returncode == 7
    without = subprocess.run(
        [sys.executable, "-c", "print('out', flush=True)"],
        stdout=open("/dev/full", "w"),  # noqa: SIM115
        stderr=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )
    assert without.returncode != 0, "an ordinary stream would have done as well"
