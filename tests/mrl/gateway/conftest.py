from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mrl.gateway.served import Serve, gateway_thread


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves a script: context's text -> turn."""
    with gateway_thread() as served:
        yield served
