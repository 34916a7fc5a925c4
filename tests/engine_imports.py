"""Imports of the fork server of the tests' engines (tests/engines.py), as in an eager run of one thread."""

import gc

from tests.forks.imports import preload

gc.disable()  # a fifth of the time that imports take
preload("engine")
gc.collect()
gc.freeze()
gc.enable()
