"""What loops of this folder's tests start ends with their test."""

from collections.abc import Iterator

import pytest

from tests.mrl.loops.table_policy import THREADS


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    while THREADS:
        THREADS.pop().close()
