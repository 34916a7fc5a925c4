"""Two pretended machines: the link between them is limited, and nothing of it stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.resharding.limited_link import INTERFACE, NAMES, link
from mrl.errors import ConfigError

ROOT = Path(__file__).parents[2]


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=30, check=True
    ).stdout


def limited_and_broken() -> None:
    """The link shows its rate at both ends; then something goes wrong beside it."""
    with link(1.0):
        for name in NAMES:
            command = ["tc", "-n", name, "qdisc", "show", "dev", INTERFACE]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            assert "tbf" in shown and "rate 1Gbit" in shown, shown
        raise InterruptedError


@pytest.mark.integration
def test_a_link_has_its_rate_at_both_ends_and_is_gone_after_an_error() -> None:
    """Without the rights to make one the error says what is needed."""
    root = os.geteuid() == 0
    with pytest.raises(InterruptedError if root else ConfigError, match="" if root else "it needs root"):
        limited_and_broken()
    assert not root or not any(name in namespaces() for name in NAMES)


@pytest.mark.integration
@pytest.mark.slow
def test_the_benchmark_runs_over_a_link_with_every_byte_where_it_belongs() -> None:
    words = "--model tiny --train 1,1,2 --rollout 2 --repeats 1 --warm-up 1 --bucket-mib 1 --verify full"
    command = [
        sys.executable,
        "-m",
        "benchmarks.resharding.limited_link",
        "--slots",
        "1",
        "--",
        *words.split(),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "both modes: gloo" in done.stdout
