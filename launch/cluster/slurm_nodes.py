"""Slurm's compact node lists ("gpu[01-03,7],login1") as plain names. Reads no environment and asks no controller."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence

from mrl.errors import ConfigError

LARGEST = 100_000
"""More names than this are taken for a mistake in the list."""


def expand(nodes: str) -> list[str]:
    """Names in the order of the list; a bracket counts with the zeros it is written with.

    >>> expand("gpu[08-10,2],rack[0-1]n[1-2]")
    ['gpu08', 'gpu09', 'gpu10', 'gpu2', 'rack0n1', 'rack0n2', 'rack1n1', 'rack1n2']
    """
    names: list[str] = []
    for word in _words(nodes):
        parts = [_choices(part, nodes) for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", word)]
        total = 1
        for part in parts:
            total *= len(part)
        if total + len(names) > LARGEST:
            raise ConfigError(f"the node list {nodes!r} names more than {LARGEST} nodes")
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return names


def _words(nodes: str) -> list[str]:
    """The list cut at commas outside brackets."""
    words, depth, word = [], 0, ""
    for letter in nodes.strip():
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise ConfigError(f"the brackets of the node list {nodes!r} do not pair")
        if letter == "," and not depth:
            words.append(word)
            word = ""
        else:
            word += letter
    words.append(word)
    if depth or not all(words):
        raise ConfigError(f"the node list {nodes!r} has an open bracket or an empty name")
    return words


def _choices(part: str, nodes: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for span in part[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if not match:
            raise ConfigError(f"{span!r} in the node list {nodes!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        low, high = int(first), int(last)
        if high < low or high - low > LARGEST:
            raise ConfigError(f"the range {span!r} in the node list {nodes!r} runs backwards or is too long")
        found += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints one name per line; for shell scripts."""
    print("\n".join(name for word in arguments for name in expand(word)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
