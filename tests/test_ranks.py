"""The ranks of the tests: started with what they need, and a stand-in for a package where one is asked for."""

import os
import sys

from tests.ranks import run_ranks
from tests.support.transformer_engine import FOLDER


def look(rank: int, world_size: int, port: int, name: str) -> tuple[bool, bool, str | None]:
    """(Megatron is imported, and with the stand-in, an environment variable)."""
    file = getattr(sys.modules.get("transformer_engine"), "__file__", None) or ""
    return "megatron.core" in sys.modules, file.startswith(str(FOLDER)), os.environ.get(name)


def test_ranks_are_forked_with_their_imports() -> None:
    assert run_ranks(look, 2, "OMP_NUM_THREADS") == [(True, False, "1")] * 2


def test_ranks_with_a_stand_in_have_imported_it() -> None:
    usual = list(sys.path)
    assert run_ranks(look, 1, "OMP_NUM_THREADS", stand_ins=FOLDER) == [(True, True, "1")]
    assert sys.path == usual
