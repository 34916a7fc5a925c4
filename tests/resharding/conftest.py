"""The two ends of one slot, over every transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from tests.resharding.exchanges import SYNC
from tests.resharding.wires import KINDS, Wire, store


@pytest.fixture(params=KINDS)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    meeting = store()
    yield Wire(request.param, meeting.port)
    del meeting


@pytest.fixture
def receiver(wire: Wire) -> Iterator[Receiver]:
    end = wire.receiver(SYNC.deadline_seconds)
    yield end
    end.close()


@pytest.fixture
def sender(wire: Wire, receiver: Receiver) -> Iterator[WeightSender]:
    end = wire.sender(receiver.address, SYNC)
    yield end
    receiver.release()
    end.close()
