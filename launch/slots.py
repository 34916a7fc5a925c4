"""How many slots a launcher's nodes have, and what a run is on fewer than it was written for (launch.elastic).

`python -m mrl.launch.slots --nodes N CONFIG...` prints the words to add to those of `mrl train`, one a line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.errors import ConfigError


def node_slots(config: Config, num_nodes: int) -> tuple[int, int]:
    """(slots, GPUs) of this node: configured, else its GPUs, else an equal share of the layout's ranks."""
    import torch

    gpus = torch.cuda.device_count()
    slots = config.launch.slots_per_node or gpus or -(-config.num_slots // num_nodes)
    return slots, min(gpus, slots)


def smaller(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Each entry of launch.elastic with the configuration that it makes. ConfigError where one is no configuration, or takes
    as many slots as the entry before it."""
    tree, before = config.model_dump(mode="json"), math.inf
    for number, words in enumerate(config.launch.elastic):
        name = f"launch.elastic.{number} ({' '.join(words)})"
        try:
            made = load_config(tree, *words)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        if made.num_slots >= before:
            raise ConfigError(
                f"{name} takes {made.num_slots} slots and the entry before it {before}: each is for fewer than the last"
            )
        before = made.num_slots
        yield words, made


def words_for(config: Config, num_slots: int) -> tuple[str, ...]:
    """What the command line needs beside its own words for the run to fit so many slots: nothing where it fits as it is, else
    the first entry of launch.elastic that does. Nothing either where none does: preflight says what lacks."""
    if config.num_slots <= num_slots:
        return ()
    return next((words for words, made in smaller(config) if made.num_slots <= num_slots), ())


def slots_message(config: Config, words: Sequence[str], num_slots: int) -> str:
    """A line for people about a choice that was made."""
    return (
        f"{num_slots} of {config.num_slots} slots are there: going on with {' '.join(words)} (launch.elastic)"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mrl.launch.slots", description=__doc__)
    parser.add_argument("config", nargs="+")
    parser.add_argument("--nodes", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        config = load_config(*options.config)
        if not config.launch.elastic:
            return 0
        num_slots = node_slots(config, options.nodes)[0] * options.nodes
        if words := words_for(config, num_slots):
            print(slots_message(config, words, num_slots), file=sys.stderr)
            print("\n".join(words))
    except ConfigError as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
