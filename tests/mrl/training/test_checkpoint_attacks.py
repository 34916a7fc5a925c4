"""A malicious checkpoint with matching digests: reading any of its files runs no code."""

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
from mrl.training.checkpoint import checkpoint_folder, plain_values, restricted_pickle
from mrl.training.checkpoint.checkpoint_folder import MANIFEST
from tests.golden_run import STEP, write_golden_model, write_run
from tests.mrl.training.make_golden import GOLDEN, SHAPE
from tests.mrl.training.scenarios import worker
from tests.ranks import run_ranks
from tests.tiny_models import write_model


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def renew(checkpoint: Path) -> None:
    """Update the manifest's digests, as if the files had been written so."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    digests = checkpoint_folder.digests(checkpoint, checkpoint_folder.file_names(checkpoint))
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"files": digests}))


def in_index(checkpoint: Path, mark: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attack(mark)))


def in_common_state(checkpoint: Path, mark: Path) -> None:
    """Put the attack into the state that all ranks share, between the tensors."""
    index = restricted_pickle.read_index(checkpoint)
    (place,) = [entry for name, entry in index.storage_data.items() if name.fqn.startswith("common_state")]
    data = saved([Attack(mark)])
    path = checkpoint / place.relative_path
    place.offset, place.length = path.stat().st_size, len(data)
    path.write_bytes(path.read_bytes() + data)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def in_common_file(checkpoint: Path, mark: Path) -> None:
    """Put it into common.pt, where Megatron wrote that state before and still reads it."""
    (checkpoint / "common.pt").write_bytes(saved(Attack(mark)))


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


PLACES: list[Callable[[Path, Path], None]] = [in_index, in_common_state, in_common_file]


def load_each(rank: int, world: int, port: int, model: str, checkpoints: list[str]) -> list[str]:
    """Return the error of loading each checkpoint."""
    at, messages = worker(rank, world, port, model, {}), []
    for path in checkpoints:
        with pytest.raises(CheckpointError) as error:
            at.load_checkpoint(path)
        messages.append(str(error.value))
    return messages


@pytest.mark.integration
def test_ranks_run_no_code_of_a_checkpoint(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=1, **SHAPE)
    paths = []
    for place in PLACES:
        paths.append(str(shutil.copytree(GOLDEN / "checkpoint", tmp_path / place.__name__)))
        place(Path(paths[-1]), tmp_path / f"{place.__name__}.ran")
        renew(Path(paths[-1]))
    (errors,) = run_ranks(load_each, 1, str(model), paths)
    assert not list(tmp_path.glob("*.ran"))
    assert all(p in line and "posix.mkdir" in line for p, line in zip(paths, errors, strict=True)), errors


@pytest.mark.parametrize("words", [["export", "run", "--dry-run"], ["export", "run", "--out", "out"]])
def test_an_export_runs_no_code_of_a_checkpoint(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path, write_golden_model(tmp_path / "model"))
    checkpoint = run / "checkpoints" / checkpoint_folder.name_of(STEP)
    in_index(checkpoint, tmp_path / "ran")
    renew(checkpoint)
    assert main(words) == 1
    assert not (tmp_path / "ran").exists() and "posix.mkdir" in capsys.readouterr().err


def test_an_index_that_is_none_is_one_error(tmp_path: Path) -> None:
    for data in (b"", b"\x80\x04N.", pickle.dumps(np.arange(3)), pickle.dumps({"a": 1})):
        (tmp_path / ".metadata").write_bytes(data)
        from mrl.training.checkpoint.reader import DistributedCheckpoint

        with pytest.raises(CheckpointError, match="not a readable distributed checkpoint"):
            DistributedCheckpoint(tmp_path)


def test_plain_values_come_back_as_they_were() -> None:
    value = {"a": [1, 2.5, True, None, "ä", float("inf")], 3: [[], b"\x00\xff"], "dict": {"e": {}}}
    assert plain_values.loads(plain_values.dumps(value)) == value
    for array in (np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2), np.float16), np.array(1.5)):
        (loaded,) = plain_values.loads(plain_values.dumps((array,)))
        assert repr(loaded) == repr(array) and loaded.dtype == array.dtype and loaded.flags.writeable


def test_other_values_and_other_bytes_are_refused() -> None:
    for value in (object(), {"a": Path("b")}, np.array([object()])):
        with pytest.raises(TypeError, match="cannot contain a value"):
            plain_values.dumps(value)
    arrays = plain_values.dumps([np.arange(4)])
    for data in (
        b"",
        arrays[:-1],
        arrays.replace(b"<i8", b"|O8"),
        b"\xff" * 20,
        b"\x91" * 100_000,
        b"\xd4\x02a",
    ):
        with pytest.raises(ValueError, match="not plain values"):
            plain_values.loads(data)
