"""Digest of a model folder, to recognise the same model wherever its files are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mrl.training.checkpoint.checkpoint_folder import digests


def model_digest(path: str) -> str:
    """Return a hex SHA-256 over names, sizes and SHA-256 of the files of a model folder."""
    files = digests(
        Path(path), [file.name for file in Path(path).iterdir() if file.is_file()], hashlib.sha256
    )
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
