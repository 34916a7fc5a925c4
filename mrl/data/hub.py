"""Read data sets of the Hugging Face hub, named hf://name@split or hf://name:configuration@split.

The name may also be a folder, laid out like a hub repository or written by `save_to_disk`. With a network the
`datasets` library downloads what is new. Without one, its cache is read, or the repository that `hf download`
left in the hub's cache.
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
"""What Arrow raises besides its own exceptions for bytes that are not valid values: text that is not UTF-8,
times beyond the calendar, negative lengths."""
_DAMAGED_FOLDER = (*DAMAGED_COLUMNS, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What `datasets` raises besides its own exceptions if the JSON of a saved folder is malformed."""
_LONGEST = 2000
"""Maximum characters of a library's message, which may quote the file's."""


def read_hub(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows with their place (the address and a number from 1), as Arrow stores them: pictures encoded.

    Raises DataError for a malformed address, a missing library, and a data set that does not exist.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise DataError(
            f"{address}: a hub data set must look like hf://name@split or hf://name:configuration@split"
        )
    number, rows = 0, _load(address, **parts.groupdict())
    import pyarrow

    try:
        for batch in rows.with_format("arrow").iter(_BATCH):
            for row in arrow_rows(batch):
                number += 1
                yield f"{address}:{number}", row
    except (*_DAMAGED_FOLDER, pyarrow.ArrowException) as error:
        raise DataError(f"{address}: cannot be read after row {number}: {repr(error)[:_LONGEST]}") from error


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
    # str() of a KeyError is only its key
    message = str(error) if isinstance(error, OSError | ValueError) else repr(error)
    return DataError(f"{address}: {message[:_LONGEST]}{advice}")


def _saved(name: str, split: str) -> Any:
    """Return the rows of a `save_to_disk` folder, else None. Raises ValueError if it lacks the split."""
    import datasets

    if os.path.isdir(name) and (
        special_files := [entry for entry in sorted(os.listdir(name)) if _never_ends(name, entry)]
    ):
        raise ValueError(f"{special_files[0]} in the folder is a pipe or a device, not a file")
    if not any(os.path.isfile(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json")):
        return None
    loaded = datasets.load_from_disk(name)
    splits = (
        {str(entry): rows for entry, rows in loaded.items()}
        if isinstance(loaded, dict)
        else {str(loaded.split or split): loaded}
    )
    if split not in splits:
        raise ValueError(f"the folder has no split {split!r}; it has {', '.join(sorted(splits))}")
    return splits[split]


def _never_ends(folder: str, file: str) -> bool:
    """Return True for a pipe or device, whose reading could block forever."""
    path = os.path.join(folder, file)
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _downloaded(name: str) -> str | None:
    """Return the folder of a repository in the hub's cache; None if it was not downloaded."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (OSError, ValueError):
        return None


def is_set(variable: str) -> bool:
    """Return True if a variable of the environment is neither empty nor 0."""
    return os.environ.get(variable, "") not in ("", "0")


def _how_to_fetch(name: str, configuration: str | None, split: str) -> str:
    if os.path.isdir(name):
        return ""
    arguments = ", ".join(repr(part) for part in (name, configuration) if part)
    offline = [*filter(is_set, ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))]
    return (
        "\nto download it, on a machine with a network"
        + (f" ({offline[0]} is set here)" if offline else "")
        + f", run either of\n  hf download --repo-type dataset {name}\n"
        + f"  python -c \"import datasets; datasets.load_dataset({arguments}, split='{split}')\"\n"
        + "and copy the result, which is under HF_HOME"
    )
