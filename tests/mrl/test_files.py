"""Files that others put there first, and files that two commands want."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.errors import ConfigError
from mrl.files import (
    highest_number,
    output_lock,
    put_aside,
    replace_durably,
    replace_text,
    share_weights,
    usual_mode,
)


def test_one_command_holds_what_it_writes(tmp_path: Path) -> None:
    """Another process learns who holds the lock; any end of the holder releases it."""
    out = tmp_path / "a folder" / "out"
    code = (
        "import sys; from pathlib import Path; from mrl.files import output_lock\n"
        "with output_lock(Path(sys.argv[1]), '--out'):\n    print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(out)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        message = rf"--out {out} is in use by host .* pid {other.pid}; wait"
        with pytest.raises(ConfigError, match=message), output_lock(out, "--out"):
            pass
        other.kill()
        other.wait(60)
    with output_lock(out, "--out"):
        assert (out.parent / "out.lock").is_file()
    assert not list(out.parent.iterdir())


def test_a_lock_that_its_holder_removes_is_not_taken_for_one(tmp_path, monkeypatch) -> None:
    """The holder ends between our opening of the file and our lock: the locked file is gone."""
    from mrl import files

    lock, taken, opened = tmp_path / "out.lock", files.take_lock, []

    def removed_once(path: Path, refusal: str) -> int:
        opened.append(taken(path, refusal))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(files, "take_lock", removed_once)
    with output_lock(tmp_path / "out", "--out"):
        assert len(opened) == 2 and lock.stat().st_ino == os.fstat(opened[-1]).st_ino


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_has_the_permissions_that_umask_gives(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = tmp_path / "weights"
        with usual_mode(path):
            path.unlink()
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for name in ("page", "page.partial"):
        kept.write_text("of somebody")
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(kept)
        replace_text(tmp_path / "page", "ours")
        replace_durably(tmp_path / "page", b"ours")
        assert kept.read_text() == "of somebody" and (tmp_path / "page").read_text() == "ours"
        assert not (tmp_path / "page").is_symlink() and not (tmp_path / "page.partial").exists()


def test_the_highest_number_counts_and_not_how_many_there_are(tmp_path: Path) -> None:
    assert highest_number(tmp_path, "attempt-*") == highest_number(tmp_path / "absent", "*") == 0
    for name in ("attempt-002", "attempt-010", "attempt-x", "attempt-", "other-99", "attempt-1000.jsonl"):
        (tmp_path / name).touch()
    assert highest_number(tmp_path, "attempt-*") == 10
    assert highest_number(tmp_path, "attempt-*.jsonl") == 1000


def test_lines_are_put_aside_one_below_the_other(tmp_path: Path) -> None:
    put_aside(tmp_path / "a", [b"x\n", b"\xff"])
    put_aside(tmp_path / "a", [b"z"])
    assert (tmp_path / "a.damaged").read_bytes() == b"x\n\xff\nz\n"


def test_weights_may_be_read_by_whom_the_configuration_may(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch(0o640)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch(0o600)
    share_weights(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640, "tokenizer.json": 0o600}
