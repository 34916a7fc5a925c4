"""A started driver reuses the memory that a step frees: counted in new pages from the kernel."""

from __future__ import annotations

from tests.support.runs import run_python

PROGRAM = """
import resource
import sys

from mrl.observe.driver_memory import tune_driver_memory

if sys.argv[1] == "settled":
    tune_driver_memory()


def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = [bytearray(48 << 20) for _ in range(3)]
    for each in memory:
        each[::4096] = b"x" * len(each[::4096])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


step()
print(step())
"""


def pages(word: str) -> int:
    return int(run_python("-c", PROGRAM, word).stdout)


def test_memory_that_a_step_frees_is_the_next_ones() -> None:
    assert pages("settled") < 1000 < 30_000 < pages("not"), "three arrays of 48 MB are 36,864 pages"


KEEPING = """
import gc
import sys

from mrl.observe.driver_memory import tune_driver_memory

if sys.argv[1] == "settled":
    tune_driver_memory()
before = gc.get_stats()[2]["collections"]
kept = [[number] for number in range(400_000)]
print(gc.get_stats()[2]["collections"] - before)
"""


def test_what_a_step_keeps_is_not_looked_through() -> None:
    """Python's thresholds would collect whenever a quarter more objects exist."""
    settled, plain = (int(run_python("-c", KEEPING, word).stdout) for word in ("settled", "not"))
    assert settled == 0 < plain
