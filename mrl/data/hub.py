"""Rows of data sets of the Hugging Face hub, named hf://name@split or hf://name:configuration@split.

The name may also be a folder, laid out as a repository of the hub is or as `save_to_disk` leaves it. With a network the `datasets` library
fetches what is new; without one its own cache is read, or the repository as `hf download` left it in the
hub's cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from mrl.data.odd_values import arrow_rows
from mrl.errors import DataError

PREFIX = "hf://"

_ADDRESS = re.compile(r"hf://(?P<name>[^:@]+)(?::(?P<configuration>[^:@]+))?@(?P<split>[^@]+)")
_BATCH = 1000
DAMAGED_COLUMNS = (OSError, ValueError, OverflowError, SystemError)
"""What Arrow raises beside its own exceptions where bytes are not those of the values that they should be: text that is not UTF-8, times
beyond the calendar, lengths below zero."""
_DAMAGED_FOLDER = (*DAMAGED_COLUMNS, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What `datasets` raises beside its own exceptions where the JSON of a saved folder lacks something, or has it in another form."""
_LONGEST = 2000
"""Characters of what a library says; it may cite the file's."""


def read_hub(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their place, the address and a number from 1, as Arrow holds them (pictures are not decoded).

    Raises DataError for an address of another form, a missing library, and a data set that is not there.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise DataError(
            f"{address}: a data set of the hub is named hf://name@split or hf://name:configuration@split"
        )
    number, rows = 0, _load(address, **parts.groupdict())
    import pyarrow

    try:
        for batch in rows.with_format("arrow").iter(_BATCH):
            for row in arrow_rows(batch):
                number += 1
                yield f"{address}:{number}", row
    except (*_DAMAGED_FOLDER, pyarrow.ArrowException) as error:
        raise DataError(f"{address}: cannot be read behind row {number}: {repr(error)[:_LONGEST]}") from error


def _load(address: str, name: str, configuration: str | None, split: str) -> Any:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"{address}: needs the package datasets (pip install datasets)") from error
    import pyarrow

    failures = (*_DAMAGED_FOLDER, DatasetsError, pyarrow.ArrowException)
    try:
        saved = _saved(name, split)
        return datasets.load_dataset(name, configuration, split=split) if saved is None else saved
    except failures as error:
        folder = _downloaded(name)
        if folder is None:
            raise _refused(address, error, _how_to_fetch(name, configuration, split)) from error
    try:
        return datasets.load_dataset(folder, configuration, split=split)
    except failures as error:
        raise _refused(address, error, _how_to_fetch(name, configuration, split)) from error


def _refused(address: str, error: Exception, advice: str) -> DataError:
    said = (
        str(error) if isinstance(error, OSError | ValueError) else repr(error)
    )  # a KeyError is its key alone
    return DataError(f"{address}: {said[:_LONGEST]}{advice}")


def _saved(name: str, split: str) -> Any:
    """The rows of a folder that `save_to_disk` wrote; None for any other name. ValueError where it has no such split."""
    import datasets

    if os.path.isdir(name) and (
        odd := [each for each in sorted(os.listdir(name)) if _never_ends(name, each)]
    ):
        raise ValueError(f"{odd[0]} in the folder is a pipe or a device, no file")
    if not any(os.path.isfile(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json")):
        return None
    found = datasets.load_from_disk(name)
    splits = (
        {str(each): rows for each, rows in found.items()}
        if isinstance(found, dict)
        else {str(found.split or split): found}
    )
    if split not in splits:
        raise ValueError(f"the folder has no split {split!r}; it has {', '.join(sorted(splits))}")
    return splits[split]


def _never_ends(folder: str, file: str) -> bool:
    """Whether reading it could wait for ever."""
    path = os.path.join(folder, file)
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _downloaded(name: str) -> str | None:
    """The folder of a repository in the hub's cache; None where it was not downloaded."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (OSError, ValueError):
        return None


def _how_to_fetch(name: str, configuration: str | None, split: str) -> str:
    if os.path.isdir(name):
        return ""
    arguments = ", ".join(repr(part) for part in (name, configuration) if part)
    offline = [switch for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(switch)]
    return (
        "\nto fetch it, where there is a network"
        + (f" (here {offline[0]} is set)" if offline else "")
        + f", either of\n  hf download --repo-type dataset {name}\n"
        + f"  python -c \"import datasets; datasets.load_dataset({arguments}, split='{split}')\"\n"
        + "puts it under HF_HOME, which may be copied"
    )
