"""A response with a known verdict, and generators of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A response, its reference, and if it is correct."""

    kind: str
    """The verifier's `reward.kind`."""
    response: str
    ground_truth: Any
    """Unparsed, as in a row of a data set."""
    right: bool
    label: str
    """The spelling or the mistake, in a few words."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rules that differ from the default, by their names in the kind's section."""


Generator = Callable[[random.Random], Iterator[Case]]
"""Yields endless cases of one class, determined by the random state."""


def take(generator: Generator, count: int, *, seed: int = 0) -> list[Case]:
    """Return the first `count` cases of a generator."""
    return list(itertools.islice(generator(random.Random(seed)), count))
