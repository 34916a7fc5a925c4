"""The session's shared engine, with weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.sections.sync import SyncSection
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.resharding.feeding import Feeder, read

SYNC = SyncSection(bucket_bytes=64 << 10, deadline_seconds=90.0)


@pytest.fixture(scope="module")
def serving(tiny_engine: EngineHost, tiny_model: Path) -> Iterator[EngineHost]:
    start = tiny_engine.call(driving.version)
    feeder = Feeder(tiny_engine.call(driving.addresses), SYNC)
    weights = read(tiny_model)
    session = feeder.session(weights, start, start + 1)
    feeding = feeder.send(session, weights)
    tiny_engine.call(driving.receive, session)
    assert not feeding.end().errors
    yield tiny_engine
    tiny_engine.call(driving.release)
    feeder.close()
