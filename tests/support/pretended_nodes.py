"""Slots of one machine that pose as several nodes; processes and messages are real."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mrl.launch.commands import start_run
from mrl.launch.workers import placement

VARIABLE = "MRL_TESTS_NODES"
"""Environment variable of a test's command: the node of each slot, as in 0,1."""


@contextlib.contextmanager
def slots_on(nodes: Sequence[int]) -> Iterator[None]:
    """Assign this process's runs to these nodes; do nothing without nodes."""

    def place(*arguments: Any, **options: Any) -> placement.Placement:
        made = placement.place(*arguments, **options)
        slots = [dataclasses.replace(s, node=n) for s, n in zip(made.slots, nodes, strict=True)]
        return dataclasses.replace(made, slots=tuple(slots))

    with pytest.MonkeyPatch.context() as patch:
        if nodes:
            patch.setattr(start_run, "place", place)
        yield
