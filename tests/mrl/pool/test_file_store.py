"""Groups in memory and in files: nothing is lost, changed or kept too long, whatever is full or damaged."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.errors import PoolError
from mrl.pool import folder as pool_folder
from mrl.pool.file_store import FileStore
from mrl.pool.group_bytes import decode_group, encode_group, size_of
from mrl.routes import RouteRows, Routes
from mrl.samples import Group
from tests.support.many_groups import assert_same, group_of, prompt_at
from tests.support.samples import make_sample

ROOT = Path(__file__).parents[3]


def store(folder: Path, *, memory_bytes: int = 0, file_bytes: int = 4096, run: str = "a") -> FileStore:
    return FileStore(folder, run=run, memory_bytes=memory_bytes, prompt_at=prompt_at, file_bytes=file_bytes)


def test_a_group_comes_back_as_it_was() -> None:
    for index in range(20):
        assert_same(decode_group(encode_group(group_of(index)), prompt_at), group_of(index))


def test_a_group_of_another_release_says_so() -> None:
    data = encode_group(group_of(1)).replace(b'"rollout_logprobs"', b'"sampler_logprobs"')
    with pytest.raises(PoolError, match=r"another release of mrl \('rollout_logprobs'\); finish the run"):
        decode_group(data, prompt_at)


def test_a_token_takes_about_eight_bytes() -> None:
    tokens = 20_000
    versions = np.repeat(np.arange(4, dtype=np.int32), tokens // 4)
    sample = make_sample(
        response_tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.bool_),
        rollout_logprobs=np.zeros(tokens, np.float32),
        policy_versions=versions,
    )
    assert len(encode_group(Group(prompt_at(0), (sample,)))) < 8.1 * tokens


@pytest.mark.parametrize("memory_bytes", [pytest.param(0, marks=pytest.mark.slow), 5_000, 1 << 30])
def test_random_puts_gets_and_releases_are_those_of_a_dictionary(tmp_path: Path, memory_bytes: int) -> None:
    """The same calls on the store and on a dictionary; files go with their groups, all but the one that is written."""
    rng, kept = random.Random(memory_bytes), {}
    in_memory, in_files = (
        [size(group_of(index)) for index in range(300)]
        for size in (size_of, lambda group: len(encode_group(group)))
    )
    pool = store(tmp_path / "pool", memory_bytes=memory_bytes)
    for index in range(300):
        kept[pool.put(group_of(index))] = index
        spilled = sum(in_files[number] for handle, number in kept.items() if handle in pool._frames)
        held = sum(in_memory[number] for handle, number in kept.items() if handle not in pool._frames)
        assert pool.memory_bytes == held <= memory_bytes
        assert pool.metrics() == {"pool/bytes": held + spilled, "pool/spilled_bytes": spilled}
        assert pool.handles == sorted(kept)
        if rng.random() < 0.5:
            gone = rng.sample(sorted(kept), min(len(kept), rng.randrange(4)))
            pool.release([*gone, 10_000])
            kept = {handle: number for handle, number in kept.items() if handle not in gone}
        asked = rng.sample(sorted(kept), min(len(kept), 3))
        for handle, found in zip(asked, pool.get(asked), strict=True):
            assert_same(found, group_of(kept[handle]))
    pool.release(list(kept))
    assert len(list((tmp_path / "pool").glob("*.groups"))) <= 1 and pool.handles == []
    pool.remove()
    assert list((tmp_path / "pool").iterdir()) == []


def test_damage_of_a_file_is_named_and_never_trained_on(tmp_path: Path) -> None:
    """Whichever byte of a group is another: of its header, or of the samples."""
    pool = store(tmp_path, file_bytes=1 << 20)
    first, second = pool.put(group_of(1)), pool.put(group_of(2))
    (path,) = tmp_path.glob("*.groups")
    data = path.read_bytes()
    start = pool._frames[second][1].start
    for at in (*range(start - 28, start), start, start + 99, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(PoolError, match=r"group 1 in .*00000000.groups is damaged"):
            pool.get([second])
        assert_same(pool.get([first])[0], group_of(1))
    path.write_bytes(data[:-1])
    with pytest.raises(PoolError, match=r"group 1 in .* is damaged"):
        pool.get([second])
    pool.close()


def test_a_folder_of_another_run_or_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    store(tmp_path / "pool", run="first").close()
    with pytest.raises(PoolError, match="belongs to the run first, not to second"):
        store(tmp_path / "pool", run="second")
    (tmp_path / "file").write_text("")
    with pytest.raises(PoolError, match="cannot open the pool's folder"):
        store(tmp_path / "file")


def test_a_full_disk_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk: the group is refused, nothing of it is left, smaller ones
    still fit, and those before are there."""
    code = f"""
import resource, signal
from pathlib import Path
from mrl.errors import PoolError
from mrl.pool import folder as pool_folder
from tests.mrl.pool.test_file_store import assert_same, group_of, store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
pool = store(Path({str(tmp_path)!r}), file_bytes=1 << 20)
kept = [pool.put(group_of(0))]
try:
    pool.put(group_of(1, tokens=3000))
except PoolError as error:
    print(error)
kept.append(pool.put(group_of(2)))
assert pool.handles == kept
assert_same(pool.get(kept)[1], group_of(2))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot keep group 1 of" in done.stdout and "File too large" in done.stdout


@pytest.mark.parametrize("megabytes", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_memory_stays_bounded_while_much_goes_through(tmp_path: Path, megabytes: int) -> None:
    """Through 64 MB of memory: this process grows by at most 128 MB, and every group comes back."""
    data = encode_group(group_of(5, num_samples=8, tokens=30_000))
    size, own = len(data), psutil.Process(os.getpid())
    pool = store(tmp_path, memory_bytes=64 << 20, file_bytes=64 << 20)
    before, handles = own.memory_info().rss, []
    for _ in range(megabytes * 1_000_000 // size):
        handles.append(pool.put(decode_group(bytes(bytearray(data)), prompt_at)))
        if len(handles) > 200:  # about what a step keeps
            (found,) = pool.get([handles[0]])
            assert len(found.samples) == 8
            pool.release([handles.pop(0)])
        assert own.memory_info().rss - before <= 128 << 20
    assert sum(path.stat().st_size for path in tmp_path.glob("*.groups")) < 201 * size + (128 << 20), (
        "released files were kept"
    )
    pool.close()


def test_routes_stay_in_memory_as_they_are(tmp_path: Path) -> None:
    """A handle of another process's memory, which no file can hold."""
    handle = object()
    routes = Routes((RouteRows(handle, 3, 7),))
    group = group_of(1)
    group = Group(group.prompt, (dataclasses.replace(group.samples[0], routes=routes), *group.samples[1:]))
    pool = store(tmp_path)
    number = pool.put(group)
    (found,) = pool.get([number])
    assert found.samples[0].routes is routes and found.samples[1].routes is None
    pool.release([number])
    assert not pool._routes
    pool.close()


def test_a_mark_that_is_no_text_is_another_runs(tmp_path: Path) -> None:
    (tmp_path / pool_folder.MARK).write_bytes(b"\xff\xfe")
    assert "belongs to the run" in pool_folder.fault(tmp_path, "run", num_bytes=0)
    with pytest.raises(PoolError, match="belongs to the run"):
        pool_folder.claim(tmp_path, "run")


def test_no_link_in_its_folder_is_written_through_and_its_files_are_for_this_user(tmp_path: Path) -> None:
    folder, other = tmp_path / "pool", tmp_path / "other"
    folder.mkdir()
    other.write_text("kept")
    (folder / pool_folder.PARTIAL_MARK).symlink_to(other)
    pool = store(folder)
    pool.put(group_of(1))
    assert other.read_text() == "kept" and pool_folder.owner_of(folder) == "a"
    (file,) = pool_folder._files(folder)
    assert file.stat().st_mode & 0o777 == 0o600
    pool.close()
