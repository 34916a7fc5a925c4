"""A Ray that does not come up is one of our errors, and leaves nothing."""

import os
import tempfile
from pathlib import Path

import pytest

from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster


def test_a_ray_that_does_not_start_says_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for an object store below the least that Ray takes, past the section's own bound."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    launch = LaunchSection.model_construct(object_store_bytes=1000)
    with (
        pytest.raises(WorkerLost, match=r"Ray did not start on this machine: .*wait for them"),
        cluster(launch, num_slots=1),
    ):
        pass
    assert not os.listdir(tmp_path)
