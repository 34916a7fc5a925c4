"""The command: an address with a token, an end by Ctrl-C, and what it refuses."""

import http.cookiejar
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from mrl.cli import main
from tests.support.run_folders import metrics_row, write_run


def test_the_address_that_is_printed_opens_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1)])
    command = [sys.executable, "-m", "mrl.cli", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            address, how_to_reach = (served.stdout.readline().strip() for _ in range(2))
            opener = urllib.request.build_opener(
                urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
            )
            with opener.open(address, timeout=240) as answer:
                assert "?" not in answer.url and b'"reward/mean"' in answer.read()
            os.kill(served.pid, signal.SIGINT)
            _, wrong = served.communicate(timeout=240)
        finally:
            served.kill()
    assert address.startswith("http://127.0.0.1:") and "ssh -L" in how_to_reach
    assert (served.returncode, wrong) == (0, "")


def test_what_cannot_be_served_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run folder and has none in it" in capsys.readouterr().err
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["watch", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port 0 takes a free one" in capsys.readouterr().err
