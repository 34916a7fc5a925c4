"""Malformed checkpoints, made of the golden one by seeds: an export has the saved weights, of this checkpoint or the one before, or says in
one sentence why not. Groups of a pool come back as they were, or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.pool import folder as pool_folder
from mrl.pool import frames
from mrl.pool.group_bytes import decode_group, encode_group
from mrl.training.checkpoint import folder as checkpoint_folder
from mrl.training.checkpoint.folder import MANIFEST, name_of
from tests.golden_run import GOLDEN, STEP, write_golden_model, write_run
from tests.mrl.training.scenarios import digests_of_folder
from tests.support.bad_files import LONGEST, failures, outcome
from tests.support.many_groups import assert_same, group_of, prompt_at
from tests.support.mutations import Mutator, copied

CASES = 100
FORMS = {".json": "json", ".yaml": "yaml", ".jsonl": "lines"}


class Cases:
    """One malformed file of a run, of its model or of a pool."""

    def __init__(self, good: Path) -> None:
        self._good = good
        expected = json.loads((GOLDEN / "expected.json").read_text())["digest"]
        self._expected = [expected]

    def __call__(self, mutator: Mutator, folder: Path) -> None:
        kind = mutator.choose(["checkpoint", "checkpoint", "checkpoint", "renewed", "run", "model", "pool"])
        mutator.told.append(kind)
        if kind == "pool":
            pooled(mutator, folder)
            return
        model = copied(self._good / "model", folder / "model")
        run = write_run(folder, model)
        newest = copied(run / "checkpoints" / name_of(STEP), run / "checkpoints" / name_of(STEP + 1))
        within = {"run": run, "model": model}.get(kind, newest)
        if kind == "run":
            (run / "metrics.jsonl").write_text('{"step": 1, "val/reward": 0.5}\n')
            (run / "versions.json").write_text('{"mrl": "1"}')
        path = mutator.choose(sorted(path for path in within.iterdir() if path.is_file()))
        mutator.told.append(path.name)
        mutator.spoil(path, FORMS.get(path.suffix, "bytes"))
        if kind == "renewed" and path.name != MANIFEST:
            renew(newest)
        self.exported(run, folder / "out", exact=kind == "checkpoint")

    def exported(self, run: Path, out: Path, *, exact: bool) -> None:
        """`exact`: what is written has the weights that were saved. Of a file whose digest was made anew nobody can know that."""
        complaint = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complaint):
            code, _ = outcome(lambda: main(["export", str(run), "--out", str(out)]))
        said = complaint.getvalue()
        assert not list(out.parent.glob("out.partial")) or code != 0
        if code == 0:
            assert not exact or digests_of_folder(out, {}, dtype="float32") == self._expected
        else:
            assert said.startswith("mrl: ") and len(said) < LONGEST and "Traceback" not in said, said
            assert not out.exists()


def renew(checkpoint: Path) -> None:
    """The manifest says what the files are now, as if it had been written so."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    names = checkpoint_folder.file_names(checkpoint)
    digests = {
        name: [(checkpoint / name).stat().st_size, digest_of(checkpoint / name, manifest)] for name in names
    }
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"files": digests}))


def digest_of(path: Path, manifest: dict[str, int]) -> str:
    return checkpoint_folder.file_digest(path, version=manifest["version"])


def pooled(mutator: Mutator, folder: Path) -> None:
    """Frames of groups in a file, and the mark of the folder they lie in."""
    groups = [group_of(number) for number in range(3)]
    path = folder / "a.groups"
    with path.open("w+b") as file:
        placed = [
            frames.append(file.fileno(), os.fstat(file.fileno()).st_size, n, encode_group(group))
            for n, group in enumerate(groups)
        ]
    mutator.spoil(path, "bytes", places=False)
    with path.open("rb") as file:
        for frame, group in zip(placed, groups, strict=True):
            found, _ = outcome(lambda frame=frame: frames.read_bytes(file.fileno(), frame, path))
            if found is not None:
                assert_same(decode_group(found, prompt_at), group)
    (folder / pool_folder.MARK).write_text("the run")
    mutator.spoil(folder / pool_folder.MARK, "bytes", places=False)
    outcome(lambda: pool_folder.claim(folder, "the run"))
    assert isinstance(outcome(lambda: pool_folder.fault(folder, "the run", num_bytes=1))[0], str)


@pytest.fixture
def cases(tmp_path: Path) -> Cases:
    write_golden_model(tmp_path / "good" / "model")
    return Cases(tmp_path / "good")


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_malformed_checkpoints(every: int, cases: Cases, tmp_path: Path) -> None:
    found = failures("checkpoint", range(0, CASES, every), cases, tmp_path)
    assert not found, found
