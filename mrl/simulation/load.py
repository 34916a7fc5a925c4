"""What a simulated run is asked: the groups of every prompt, drawn by its index alone, so that every schedule meets the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

BLOCK = 256
"""Prompts that are drawn together."""

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(dice, n) -> [n, samples] tokens of n groups' responses, at least 1 each."""


class Load:
    """The groups of a run."""

    def __init__(self, draw: Draw, *, prompt_tokens: int = 0, filtered: float = 0.0, seed: int = 0) -> None:
        """`prompt_tokens`: of each prompt. `filtered`: share of the groups that the run's filter drops."""
        self._draw, self.prompt_tokens, self._filtered, self._seed = draw, prompt_tokens, filtered, seed
        self.samples = draw(np.random.default_rng(0), 1).shape[1]
        """Of a group."""
        self._blocks: dict[int, tuple[list[list[int]], list[bool]]] = {}

    def lengths(self, index: int) -> list[int]:
        """Tokens of each response to a prompt."""
        return self._block(index)[0][index % BLOCK]

    def is_kept(self, index: int) -> bool:
        """Whether the filter keeps a prompt's group: a fact of the prompt, whenever it is judged."""
        return self._block(index)[1][index % BLOCK]

    def _block(self, index: int) -> tuple[list[list[int]], list[bool]]:
        number = index // BLOCK
        if number not in self._blocks:
            dice = np.random.default_rng((self._seed, number))
            lengths = self._draw(dice, BLOCK).tolist()
            self._blocks[number] = lengths, (dice.random(BLOCK) >= self._filtered).tolist()
        return self._blocks[number]


def log_normal(samples: int, *, mean: float, sigma: float, most: int, correlation: float = 0.5) -> Draw:
    """Lengths whose logarithm is normal with deviation `sigma`, cut to `most`, with this mean after the cut. `correlation`: the
    share of the logarithm's variance that a group has in common: some prompts take longer than others."""
    location = _location(mean, sigma, most)
    common, own = sigma * math.sqrt(correlation), sigma * math.sqrt(1 - correlation)

    def draw(dice: np.random.Generator, count: int) -> np.ndarray:
        normal = common * dice.standard_normal((count, 1)) + own * dice.standard_normal((count, samples))
        return np.clip(np.rint(np.exp(location + normal)), 1, most).astype(np.int64)

    return draw


def resampled(groups: Sequence[Sequence[int]]) -> Draw:
    """Whole groups of those given, each as likely: what the samples of a prompt have in common stays."""
    known = np.array(groups, dtype=np.int64).clip(min=1)

    def draw(dice: np.random.Generator, count: int) -> np.ndarray:
        return known[dice.integers(len(known), size=count)]

    return draw


def _location(mean: float, sigma: float, most: int) -> float:
    """The mean of the logarithm with which lengths cut to `most` have this mean; found by halving, over fixed quantiles."""
    dice = np.random.default_rng(0)
    normal = sigma * dice.standard_normal(20_000)
    low, high = math.log(mean) - 10 * sigma - 1, math.log(mean) + 10 * sigma + 1
    for _ in range(60):
        middle = (low + high) / 2
        if np.minimum(np.exp(middle + normal), most).mean() < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
