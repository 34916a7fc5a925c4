"""A checkpoint of somebody else, with digests that fit: reading it runs no code, in whichever of its files that stands."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.cli import main
from mrl.errors import CheckpointError
from mrl.training.checkpoint import checkpoint_folder, closed_pickle, plain_values
from mrl.training.checkpoint.atomic_save import random_file
from mrl.training.checkpoint.checkpoint_folder import MANIFEST, PICKLED_EXTRA, VERSION, read_extra
from tests.golden_run import STEP, write_golden_model, write_run
from tests.mrl.training.make_golden import FOLDER, SHAPE
from tests.mrl.training.scenarios import worker
from tests.ranks import run_ranks
from tests.tiny_models import write_model

GOLDEN = FOLDER / f"version-{VERSION}" / "checkpoint"


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def renew(checkpoint: Path) -> None:
    """The manifest says what the files are now, as if it had been written so."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    digests = checkpoint_folder.digests(
        checkpoint, checkpoint_folder.file_names(checkpoint), version=manifest["version"]
    )
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"files": digests}))


def in_index(checkpoint: Path, mark: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attack(mark)))


def in_extra(checkpoint: Path, mark: Path) -> None:
    (checkpoint / checkpoint_folder.EXTRA_FILE).unlink()
    (checkpoint / PICKLED_EXTRA).write_bytes(pickle.dumps({"user": Attack(mark)}))


def in_random_state(checkpoint: Path, mark: Path) -> None:
    (checkpoint / random_file(0)).unlink()
    (checkpoint / random_file(0)).with_suffix(".pickle").write_bytes(pickle.dumps(Attack(mark)))


def in_tensor_of_random_state(checkpoint: Path, mark: Path) -> None:
    """Inside the bytes of a tensor, which torch unpickles on its own."""

    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (saved(Attack(mark)),)

    (checkpoint / random_file(0)).unlink()
    (checkpoint / random_file(0)).with_suffix(".pickle").write_bytes(pickle.dumps(Storage()))


def in_common_state(checkpoint: Path, mark: Path) -> None:
    """In what all ranks share, which lies between the tensors."""
    index = closed_pickle.read_index(checkpoint)
    (place,) = [each for name, each in index.storage_data.items() if name.fqn.startswith("common_state")]
    data = saved([Attack(mark)])
    path = checkpoint / place.relative_path
    place.offset, place.length = path.stat().st_size, len(data)
    path.write_bytes(path.read_bytes() + data)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def in_common_file(checkpoint: Path, mark: Path) -> None:
    """Where version 1 had that; Megatron still reads it."""
    (checkpoint / "common.pt").write_bytes(saved(Attack(mark)))


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


PLACES: list[Callable[[Path, Path], None]] = [
    in_index, in_extra, in_random_state, in_tensor_of_random_state, in_common_state, in_common_file,
]  # fmt: skip


def load_each(rank: int, world: int, port: int, model: str, checkpoints: list[str]) -> list[str]:
    """What loading each of them says."""
    at, said = worker(rank, world, port, model, {}), []
    for path in checkpoints:
        with pytest.raises(CheckpointError) as error:
            at.load_checkpoint(path)
        said.append(str(error.value))
    return said


@pytest.mark.integration
def test_ranks_run_no_code_of_a_checkpoint(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=1, **SHAPE)
    paths = []
    for place in PLACES:
        paths.append(str(shutil.copytree(GOLDEN, tmp_path / place.__name__)))
        place(Path(paths[-1]), tmp_path / f"{place.__name__}.ran")
        renew(Path(paths[-1]))
    (said,) = run_ranks(load_each, 1, str(model), paths)
    assert not list(tmp_path.glob("*.ran"))
    assert all(path in line and "posix.mkdir" in line for path, line in zip(paths, said, strict=True)), said


@pytest.mark.parametrize("words", [["export", "run", "--dry-run"], ["export", "run", "--out", "out"]])
def test_an_export_runs_no_code_of_a_checkpoint(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path, write_golden_model(tmp_path / "model"))
    checkpoint = run / "checkpoints" / checkpoint_folder.name_of(STEP)
    in_index(checkpoint, tmp_path / "ran")
    renew(checkpoint)
    assert main(words) == 1
    assert not (tmp_path / "ran").exists() and "posix.mkdir" in capsys.readouterr().err


def test_the_loop_s_state_runs_no_code(tmp_path: Path) -> None:
    """`mrl train --dry-run` reads it before any digest is compared."""
    checkpoint = Path(shutil.copytree(GOLDEN, tmp_path / "checkpoint"))
    in_extra(checkpoint, tmp_path / "ran")
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which has no place in a checkpoint"):
        read_extra(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_an_index_that_is_none_is_one_error(tmp_path: Path) -> None:
    for data in (b"", b"\x80\x04N.", pickle.dumps(np.arange(3)), pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(data)
        from mrl.training.checkpoint.reader import DistributedCheckpoint

        with pytest.raises(CheckpointError, match="not a readable distributed checkpoint"):
            DistributedCheckpoint(tmp_path)


VALUES: list[Any] = [
    None,
    {"a": [1, 2.5, True, None, "ä\ud800", float("inf")], 3: ("x", (), b"\x00\xff"), "tuple": {"dict": []}},
    {"arrays": [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2), np.float16), np.array(1.5)]},
]


@pytest.mark.parametrize("value", VALUES, ids=["none", "tree", "arrays"])
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = plain_values.loads(plain_values.dumps(value))
    assert repr(found) == repr(value)
    for ours, theirs in (
        zip(*(each["arrays"] for each in (found, value)), strict=True) if value and "arrays" in value else ()
    ):
        assert ours.dtype == theirs.dtype and ours.flags.writeable


def test_other_values_and_other_bytes_are_refused() -> None:
    for value in (object(), {"a": Path("b")}, np.array([object()])):
        with pytest.raises(TypeError, match="no place for a value"):
            plain_values.dumps(value)
    good = plain_values.dumps(VALUES[1])
    arrays = plain_values.dumps([np.arange(4)])
    bad = [
        b"",
        good[:-1],
        good[:20],
        arrays.replace(b"<i8", b"|O8"),
        arrays[:-1],
        b"\xff" * 20,
        b"[" * 100_000,
    ]
    for data in bad:
        with pytest.raises(ValueError, match="no plain values"):
            plain_values.loads(data)
