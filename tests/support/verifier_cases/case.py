"""One response whose verdict is known beforehand, and what makes endless ones."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A response, what it is compared with, and whether it is right."""

    kind: str
    """The verifier: what `reward.kind` names."""
    response: str
    ground_truth: Any
    """As in a row of a data set, before any parser has seen it."""
    right: bool
    label: str
    """The spelling or the mistake, in a few words."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rules that differ from the default, by their names in the kind's section."""


Generator = Callable[[random.Random], Iterator[Case]]
"""Endless cases of one class, the same ones for the same state of the random numbers."""


def take(generator: Generator, count: int, *, seed: int = 0) -> list[Case]:
    """The first `count` cases of a generator."""
    return list(itertools.islice(generator(random.Random(seed)), count))
