"""One rank's results, computed once for all tests of this folder."""

import pytest

from tests.mrl.training.layouts import OneRank


@pytest.fixture(scope="session")
def one_rank_of(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("one-rank"))
