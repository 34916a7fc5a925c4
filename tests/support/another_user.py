"""Another user of this machine, who tries things: only root can be one."""

import os
import subprocess
import sys

import pytest

NOBODY = 65534
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
_BEGINNING = f"""
import array, glob, json, os, pickle, shutil, socket, sys, time
from multiprocessing import reduction
from pathlib import Path
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def started_by_another_user(program: str, *words: str) -> subprocess.Popen[str]:
    """Start a program as user `NOBODY`, who may not be able to read Python: the usual imports are made before."""
    return subprocess.Popen(
        [sys.executable, "-c", _BEGINNING + program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def tried_by_another_user(program: str, *words: str, seconds: float = 60.0) -> str:
    """Run a program as user `NOBODY`; return what it printed. Its error is one of the test."""
    with started_by_another_user(program, *words) as process:
        try:
            printed, errors = process.communicate(timeout=seconds)
        finally:
            process.kill()
    assert not process.returncode, errors
    return printed
