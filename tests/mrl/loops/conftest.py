"""Closes the threads that a test of this folder started."""

from collections.abc import Iterator

import pytest

from tests.mrl.loops.table_policy import THREADS


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    while THREADS:
        THREADS.pop().close()
