"""Data sets of the Hugging Face hub, offline: a folder, the library's cache, a downloaded repository."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.data import DataSection
from mrl.data.load_rows import load_data
from mrl.data.row_files import read_rows
from mrl.errors import DataError
from mrl.rewards.kinds.reward_section import RewardSection

ROWS = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(3)]

CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main.jsonl}]
- config_name: other
  data_files: [{split: train, path: other.jsonl}, {split: test, path: main.jsonl}]
---
"""


def write_repository(folder: Path) -> Path:
    """Write a repository of two configurations; the second has the rows in reverse."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for name, rows in (("main", ROWS), ("other", ROWS[::-1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set empty caches of both libraries under `tmp_path`, and no network."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def rows_of(address: str) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(address)]


def test_a_folder_laid_out_as_a_repository(caches: Path, plain_tokenizer: Any) -> None:
    folder = write_repository(caches / "sums")
    assert list(read_rows(f"hf://{folder}:main@train")) == [
        (f"hf://{folder}:main@train:{n}", row) for n, row in enumerate(ROWS, 1)
    ]
    assert rows_of(f"hf://{folder}:other@train[:2]") == ROWS[:0:-1]
    section = DataSection(train=f"hf://{folder}:main@train", validation=f"hf://{folder}:other@test")
    data = load_data(section, RewardSection.model_validate({"kind": "maths"}), plain_tokenizer)
    assert [p.ground_truth for p in data.train[0].rows] == ["1", "2", "3"]
    assert data.report.overlapping == 3


def test_a_downloaded_repository(caches: Path) -> None:
    """`hf download --repo-type dataset me/sums` leaves links of a snapshot to blobs."""
    hub = caches / "hub" / "datasets--me--sums"
    contents = write_repository(hub / "blobs")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("c0ffee")
    (hub / "snapshots" / "c0ffee").mkdir(parents=True)
    for number, file in enumerate(sorted(contents.iterdir())):
        moved = file.rename(contents / f"{number:040x}")
        (hub / "snapshots" / "c0ffee" / file.name).symlink_to(f"../../blobs/{moved.name}")
    assert rows_of("hf://me/sums:other@train") == ROWS[::-1]


def test_a_data_set_in_the_cache_of_the_library(caches: Path) -> None:
    from datasets.packaged_modules.json.json import Json

    files = {"train": [str(write_repository(caches / "files") / "main.jsonl")]}
    builder = Json(
        str(caches / "made"), dataset_name="sums", config_name="main", hash="0" * 16, data_files=files
    )
    builder.download_and_prepare()
    place = caches / "datasets" / "me___sums" / "main" / "0.0.0" / ("0" * 16)
    place.parent.mkdir(parents=True)
    shutil.move(builder.cache_dir, place)
    assert rows_of("hf://me/sums:main@train") == ROWS
    assert rows_of("hf://me/sums@train") == ROWS


def test_what_is_not_there_is_named_with_the_commands_that_fetch_it(caches: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows_of("hf://me/nothing:main@train")
    message = str(caught.value)
    assert message.startswith("hf://me/nothing:main@train: Couldn't reach")
    assert "hf download --repo-type dataset me/nothing\n" in message
    assert "datasets.load_dataset('me/nothing', 'main', split='train')" in message


@pytest.mark.parametrize(
    ("suffix", "says"),
    [
        (":third@train", "'third' not found. Available: .'main', 'other'"),
        (":main@test", "Unknown split .test."),
        (":main", "must look like hf://name@split"), ("@train@test", "must look like hf://name@split"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_named(suffix: str, says: str, caches: Path) -> None:
    folder = write_repository(caches / "sums")
    with pytest.raises(DataError, match=says):
        rows_of(f"hf://{folder}{suffix}")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"me/sums@train: needs the package datasets \(pip install datasets\)"
    ):
        rows_of("hf://me/sums@train")


def test_a_file_that_is_no_data_is_named(caches: Path) -> None:
    folder = write_repository(caches / "sums")
    (folder / "main.jsonl").write_text("no rows")
    with pytest.raises(DataError, match=r"sums:main@train: "):
        rows_of(f"hf://{folder}:main@train")


def test_a_name_that_is_no_file_points_to_the_hub() -> None:
    with pytest.raises(DataError, match=r"openai/gsm8k: no such file.*hf://name@split"):
        rows_of("openai/gsm8k")


def test_a_folder_that_save_to_disk_wrote(tmp_path: Path, caches: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(str(tmp_path / "both"))
    rows.save_to_disk(str(tmp_path / "one"))
    assert [row for _, row in read_rows(f"hf://{tmp_path}/both@test")] == ROWS[2:]
    assert next(iter(read_rows(f"hf://{tmp_path}/one@train"))) == (f"hf://{tmp_path}/one@train:1", ROWS[0])
    with pytest.raises(DataError, match="no split 'dev'; it has test, train"):
        list(read_rows(f"hf://{tmp_path}/both@dev"))


def without_a_key(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(
        json.dumps({name: state[name] for name in state if name != "_format_columns"})
    )


def with_a_pipe(folder: Path) -> None:
    (folder / "dataset_info.json").unlink()
    os.mkfifo(folder / "dataset_info.json")


def with_a_long_value(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_format_type": "x" * 70_000}))


@pytest.mark.parametrize("spoil", [without_a_key, with_a_pipe, with_a_long_value])
def test_a_damaged_folder_of_rows_is_refused_in_a_sentence(caches, spoil) -> None:
    import datasets

    folder = caches / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
    spoil(folder)
    with pytest.raises(DataError, match=f"hf://{folder}@train: ") as error:
        rows_of(f"hf://{folder}@train")
    assert len(str(error.value)) < 5000
