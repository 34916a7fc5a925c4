"""Which checkpoint folders are accepted, refused and pruned; no engine, no ranks."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from mrl.errors import CheckpointError, DamagedCheckpoint
from mrl.files import PARTIAL
from mrl.training.checkpoint import checkpoint_folder as folders
from mrl.training.checkpoint import loading
from mrl.training.checkpoint.shard_writer import DigestingStream


def write_checkpoint(parent: Path, name: str) -> Path:
    """Write a committed folder with two files."""
    out = parent / name
    (out / "inner").mkdir(parents=True)
    (out / "a.bin").write_bytes(b"first" * 100)
    (out / "inner" / "b.bin").write_bytes(b"second" * 50)
    files = folders.digests(out, folders.file_names(out))
    (out / folders.MANIFEST).write_text(json.dumps({"version": folders.VERSION, "about": {}, "files": files}))
    return out


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "inner" / "b.bin").read_bytes())
    data[7] ^= 1
    (path / "inner" / "b.bin").write_bytes(data)


DAMAGES = {
    "bit flipped": (flip_a_bit, "b.bin.*digest"),
    "file missing": (lambda path: (path / "a.bin").unlink(), "a.bin is missing"),
    "file cut": (lambda path: (path / "a.bin").write_bytes(b"first"), "a.bin has 5 bytes"),
    "file added": (lambda path: (path / "c.bin").write_bytes(b""), "c.bin is not listed"),
    "manifest missing": (lambda path: (path / folders.MANIFEST).unlink(), "not complete"),
    "manifest cut": (lambda path: (path / folders.MANIFEST).write_text('{"version'), "not complete"),
    "manifest no text": (lambda path: (path / folders.MANIFEST).write_bytes(b"\xff\xfe{}"), "not complete"),
    "manifest nested": (lambda path: (path / folders.MANIFEST).write_text("[" * 100_000), "not complete"),
    "manifest a list": (lambda path: (path / folders.MANIFEST).write_text("[2]"), "version 'None'"),
    "manifest without digests": (
        lambda path: (path / folders.MANIFEST).write_text(
            '{"version": 4, "about": {}, "files": {"a.bin": [500]}}'
        ),
        "does not list files",
    ),
    "other version": (lambda path: (path / folders.MANIFEST).write_text('{"version": 99}'), "version '99'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_one_before_is_taken(damage, tmp_path, caplog) -> None:
    older, newer = (write_checkpoint(tmp_path, name) for name in ("step-00000009", "step-00000010"))
    assert folders.latest_checkpoint(tmp_path) == newer
    spoil, reason = DAMAGES[damage]
    spoil(newer)
    with pytest.raises(CheckpointError, match=reason):
        folders.verify_files(newer)
    with pytest.raises(CheckpointError, match=reason):
        _ = [folders.verify_files(newer, share=share, shares=3) for share in (1, 2, 0)]
    with caplog.at_level(logging.WARNING):
        assert folders.latest_checkpoint(tmp_path) == older
    assert "step-00000010" in caplog.text


def test_all_broken_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    assert folders.latest_checkpoint(tmp_path) is None
    assert folders.latest_checkpoint(tmp_path / "absent") is None
    flip_a_bit(write_checkpoint(tmp_path, "step-00000001"))
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        folders.latest_checkpoint(tmp_path)


def test_a_partial_folder_is_never_taken(tmp_path: Path) -> None:
    older = write_checkpoint(tmp_path, "step-00000001")
    write_checkpoint(tmp_path, "step-00000002" + PARTIAL)
    assert folders.latest_checkpoint(tmp_path) == older


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        write_checkpoint(tmp_path, f"step-{step:08d}")
    write_checkpoint(tmp_path, "step-00000012" + PARTIAL)
    removed = folders.prune(tmp_path, keep=2)
    assert len(removed) == 3
    assert [p.name for p in folders.candidates(tmp_path)] == ["step-00000011", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2


def test_prune_removes_damaged_ones_with_those_of_their_age(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, folders.name_of(step))
    folders.rename_rejected_from(tmp_path / folders.name_of(2))
    write_checkpoint(tmp_path, folders.name_of(2))
    assert folders.prune(tmp_path, keep=2) == []
    write_checkpoint(tmp_path, folders.name_of(3))
    assert [path.name for path in folders.prune(tmp_path, keep=1)] == [
        "step-000002",
        "step-000001",
        "step-000002.damaged",
    ]


def test_prune_spares_what_is_still_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, folders.name_of(step))
    removed = folders.prune(tmp_path, keep=1, spare=[folders.name_of(1)])
    assert [folders.step_of(path) for path in removed] == [2]
    assert [folders.step_of(path) for path in folders.candidates(tmp_path)] == [3, 1]


def test_a_load_verifies_this_ranks_share_before_it_reads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone would take half an hour for 3 TB, and the others would time out."""
    calls: list[tuple[Path, int, int]] = []

    def verify(path: Path, *, share: int = 0, shares: int = 1) -> None:
        calls.append((path, share, shares))
        raise CheckpointError("enough")

    for name, value in (("get_rank", 2), ("get_world_size", 4)):
        monkeypatch.setattr(loading.dist, name, lambda value=value: value)
    monkeypatch.setattr(loading, "run_everywhere", lambda action: action())
    monkeypatch.setattr(folders, "verify_files", verify)
    with pytest.raises(CheckpointError, match="enough"):
        loading.load_state(Path("step-1"), {}, about={})
    assert calls == [(Path("step-1"), 2, 4)]


def test_shares_verify_every_byte_once(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    path.mkdir()
    for number in range(23):
        (path / f"{number:02d}.bin").write_bytes(bytes([number]) * (1000 - number**2))
    files = folders.digests(path, folders.file_names(path))
    manifest = {"version": folders.VERSION, "about": {}, "files": files}
    (path / folders.MANIFEST).write_text(json.dumps(manifest))
    shares = [folders.share_of(manifest, share, 4) for share in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name][0] for name in share) for share in shares]
    assert max(loads) - min(loads) <= 1000, "more than one file's bytes apart"
    (path / "17.bin").write_bytes(bytes(1000 - 17**2))
    (guilty,) = (number for number, names in enumerate(shares) if "17.bin" in names)
    for share in range(4):
        expected = pytest.raises(DamagedCheckpoint, match=r"17\.bin") if share == guilty else nullcontext()
        with expected:
            folders.verify_files(path, share=share, shares=4)


def test_a_rank_asks_the_file_system_for_its_own_share(tmp_path, monkeypatch) -> None:
    """If all 512 ranks checked all files, the file system would get half a million requests."""
    path = write_checkpoint(tmp_path, "step-00000001")
    manifest, names, is_file = folders.read_manifest(path), set[str](), Path.is_file

    def counted(file: Path) -> bool:
        names.add(str(file.relative_to(path)))
        return is_file(file)

    monkeypatch.setattr(Path, "is_file", counted)
    folders.verify_files(path, share=1, shares=2)
    assert names - {folders.MANIFEST} == set(folders.share_of(manifest, 1, 2)) < set(manifest["files"])


def test_a_file_is_digested_as_it_is_written(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        stream = DigestingStream(file)
        for part in (b"first", memoryview(bytes(70_000)), b""):
            stream.write(part)
        assert stream.tell() == 70_005
    assert folders.file_digest(tmp_path / "file") == stream.hexdigest()


def test_a_fault_that_is_no_damage_ends_the_search(tmp_path: Path) -> None:
    """Another model's checkpoint is not skipped in favour of an older one."""
    write_checkpoint(tmp_path, "step-00000001")
    newer = write_checkpoint(tmp_path, "step-00000002")

    def take(path: Path) -> str:
        if path == newer:
            raise CheckpointError("another model")
        return path.name

    with pytest.raises(CheckpointError, match="another model"):
        folders.take_latest(tmp_path, take)
    flip_a_bit(newer)
    assert (
        folders.take_latest(tmp_path, lambda path: folders.verify_files(path) and path.name)[1]
        == "step-00000001"
    )
