"""Groups in memory and in files: nothing is lost, changed or kept too long, whatever is killed, full or damaged."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.errors import PoolError
from mrl.pool.file_store import FileStore
from mrl.pool.group_bytes import decode, encode
from mrl.samples import Group, Prompt, Segment, Status
from tests.support.samples import make_sample, verdict_of

ROOT = Path(__file__).parents[3]


def prompt_at(index: int) -> Prompt:
    return Prompt(index, np.arange(index % 5, dtype=np.int32), "", None)


def group_of(index: int, *, num_samples: int = 4, tokens: int = 50) -> Group:
    """Samples that differ in everything a sample can have, by `index`."""
    rng = np.random.default_rng(index)
    samples = []
    for number in range(num_samples):
        length = int(rng.integers(0, 2 * tokens))
        half = length // 2
        verdict = dataclasses.replace(
            verdict_of(float(number)),
            parts={"format": 0.5},
            token_values=rng.random(length, np.float32) if number == 1 else None,
        )
        samples.append(
            make_sample(
                index,
                number,
                response_tokens=rng.integers(0, 1 << 17, length).astype(np.int32),
                loss_mask=rng.random(length) < 0.9,
                rollout_logprobs=rng.standard_normal(length).astype(np.float32),
                policy_versions=np.repeat([3, 4], [half, length - half]).astype(np.int32),
                status=list(Status)[number % 3],
                response_text="Ü🙂" * number,
                segments=(Segment(0, half, 3, 0, 1, 2**63 + 5),) if half else (),
                routed_experts=rng.integers(0, 9, (3, 2, 2)).astype(np.int16) if number == 2 else None,
                verdict=verdict if number else None,
            )
        )
    return Group(prompt_at(index), tuple(samples))


def assert_same(found: object, expected: object) -> None:
    """Equal in every field, arrays in dtype and shape too."""
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple) and expected and dataclasses.is_dataclass(expected[0]):
        assert isinstance(found, tuple) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray) and found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def store(folder: Path, *, memory_bytes: int = 0, file_bytes: int = 4096, run: str = "a") -> FileStore:
    return FileStore(folder, run=run, memory_bytes=memory_bytes, prompt_at=prompt_at, file_bytes=file_bytes)


def test_a_group_comes_back_as_it_was() -> None:
    for index in range(20):
        assert_same(decode(encode(group_of(index)), prompt_at), group_of(index))


def test_a_token_takes_about_eight_bytes() -> None:
    tokens = 20_000
    versions = np.repeat(np.arange(4, dtype=np.int32), tokens // 4)
    sample = make_sample(
        response_tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.bool_),
        rollout_logprobs=np.zeros(tokens, np.float32),
        policy_versions=versions,
    )
    assert len(encode(Group(prompt_at(0), (sample,)))) < 8.1 * tokens


@pytest.mark.parametrize("memory_bytes", [0, 5_000, 1 << 30])
def test_random_puts_gets_seals_and_releases_are_those_of_a_dictionary(
    tmp_path: Path, memory_bytes: int
) -> None:
    """The same calls on the store and on a dictionary, with reopening after seals; at the end no file is left."""
    rng, kept = random.Random(memory_bytes), {}
    sizes = [len(encode(group_of(index))) for index in range(300)]
    pool = store(tmp_path / "pool", memory_bytes=memory_bytes)
    for index in range(300):
        kept[pool.put(group_of(index))] = index
        size = sum(sizes[number] for number in kept.values())
        assert pool.memory_bytes <= memory_bytes and pool.metrics()["pool/bytes"] == size
        assert pool.metrics()["pool/spilled_bytes"] == size - pool.memory_bytes
        if rng.random() < 0.5:
            gone = rng.sample(sorted(kept), min(len(kept), rng.randrange(4)))
            pool.release([*gone, 10_000])
            kept = {handle: number for handle, number in kept.items() if handle not in gone}
        if rng.random() < 0.05:
            said = pool.snapshot()
            assert sorted(h for handles in said.values() for h in handles) == sorted(kept) == pool.handles
            assert pool.memory_bytes == 0
            pool.close()
            pool = store(tmp_path / "pool", memory_bytes=memory_bytes)
            assert set(pool.handles) >= set(kept), "a release is not written, all else is"
            pool.release(set(pool.handles) - set(kept))
        asked = rng.sample(sorted(kept), min(len(kept), 3))
        for handle, found in zip(asked, pool.get(asked), strict=True):
            assert_same(found, group_of(kept[handle]))
    pool.release(list(kept))
    pool.seal()
    assert [path.name for path in (tmp_path / "pool").iterdir()] == ["run"] and pool.handles == []
    pool.close()


WRITER = """
import sys
from pathlib import Path
from tests.mrl.pool.test_file_store import group_of, store
pool = store(Path(sys.argv[1]), file_bytes=20_000)
groups = [group_of(index) for index in range(20)]
print("ready", flush=True)
for number in range(100_000):
    handle = pool.put(groups[number % 20])
    print(handle, flush=True)
"""


def killed_writer(folder: Path, seconds: float) -> list[int]:
    """The handles that a process acknowledged until it was killed at a random moment."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    said = process.stdout.read()
    process.stdout.close()
    return [int(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path, times: int) -> None:
    """Exactly those, and perhaps one more whose word was on its way; each as it was put."""
    rng = random.Random(7)
    for number in range(times):
        folder = tmp_path / str(number)
        said = killed_writer(folder, rng.random() * 0.2)
        pool = store(folder)
        assert pool.handles[: len(said)] == said == list(range(len(said)))
        assert len(pool.handles) - len(said) <= 1
        for handle in rng.sample(pool.handles, min(5, len(pool.handles))):
            assert_same(pool.get([handle])[0], group_of(handle % 20))
        assert pool.put(group_of(3)) == len(pool.handles) - 1, "numbers go on after the last"
        pool.close()


def test_every_torn_tail_is_cut_at_the_last_whole_group(tmp_path: Path) -> None:
    """A file that ends anywhere in its last frame, or has a byte of it flipped."""
    pool = store(tmp_path / "whole", file_bytes=1 << 20)
    for index in range(3):
        pool.put(group_of(index, num_samples=2))
    (path,) = (tmp_path / "whole").glob("*.open")
    data, last = path.read_bytes(), pool._frames[2][1]
    cuts = [data[:end] for end in range(last.start - 28, last.end, 41)]
    flipped = data[: last.start + 9] + bytes([data[last.start + 9] ^ 1]) + data[last.start + 10 :]
    for number, torn in enumerate([*cuts, flipped]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "00000000.open").write_bytes(torn)
        opened = store(folder)
        assert opened.handles == [0, 1]
        assert (folder / "00000000.sealed").stat().st_size == last.start - 28
        assert_same(opened.get([1])[0], group_of(1, num_samples=2))
        opened.close()
    pool.close()


def test_damage_of_a_sealed_file_is_named_and_never_trained_on(tmp_path: Path) -> None:
    pool = store(tmp_path)
    handle = pool.put(group_of(1))
    pool.seal()
    (path,) = tmp_path.glob("*.sealed")
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    with pytest.raises(PoolError, match=r"group 0 in .*00000000.sealed is damaged"):
        pool.get([handle])
    pool.close()
    with pytest.raises(PoolError, match="a sealed file is never torn"):
        store(tmp_path)


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
    pool = store(tmp_path)
    assert pool.handles == [0, 1]
    pool.close()


@pytest.mark.parametrize("megabytes", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_memory_stays_bounded_while_much_goes_through(tmp_path: Path, megabytes: int) -> None:
    """Through 64 MB of memory: this process grows by at most 128 MB, and every group comes back."""
    group = group_of(5, num_samples=8, tokens=30_000)
    size, own = len(encode(group)), psutil.Process(os.getpid())
    pool = store(tmp_path, memory_bytes=64 << 20, file_bytes=64 << 20)
    before, handles = own.memory_info().rss, []
    for _ in range(megabytes * 1_000_000 // size):
        handles.append(pool.put(group))
        if len(handles) > 200:  # about what a step keeps
            (found,) = pool.get([handles[0]])
            assert len(found.samples) == 8
            pool.release([handles.pop(0)])
        assert own.memory_info().rss - before <= 128 << 20
    assert len(list(tmp_path.glob("*.sealed"))) * (64 << 20) < 201 * size + (128 << 20), (
        "released files were kept"
    )
    pool.close()
