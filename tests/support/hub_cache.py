"""A cache of the Hugging Face hub without a network, laid out as huggingface_hub lays it out."""

from __future__ import annotations

import hashlib
from pathlib import Path

import huggingface_hub.constants
import pytest

REVISION = "c0ffee" * 6 + "c0ff"


def use_cache(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """Make this process use the cache under `home` (HF_HOME), and no network; return the cache's folder."""
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return home / "hub"


def add_model(cache: Path, name: str, folder: Path) -> Path:
    """Move a model's files into the cache, as `hf download NAME` leaves them; return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / REVISION, repository / "blobs"
    for parent in (snapshot, blobs, repository / "refs"):
        parent.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for file in sorted(folder.iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot
