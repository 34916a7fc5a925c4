"""Count the slots of a launcher's nodes, and choose the overrides for fewer slots (launch.elastic).

`python -m mrl.launch.slots --nodes N CONFIG...` prints the overrides to add to `mrl train`, one per line.
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
    """Return this node's (slots, GPUs); slots: as configured, else its GPUs, else a share of the layout."""
    import torch

    gpus = torch.cuda.device_count()
    slots = config.launch.slots_per_node or gpus or -(-config.num_slots // num_nodes)
    return slots, min(gpus, slots)


def smaller(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Yield each entry of launch.elastic with its configuration. Raises ConfigError if one is invalid, or
    does not need fewer slots than the one before it."""
    tree, previous = config.model_dump(mode="json"), math.inf
    for number, words in enumerate(config.launch.elastic):
        name = f"launch.elastic.{number} ({' '.join(words)})"
        try:
            smaller_config = load_config(tree, *words)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        if smaller_config.num_slots >= previous:
            raise ConfigError(
                f"{name} needs {smaller_config.num_slots} slots, the entry before it {previous}: each entry "
                "must need fewer"
            )
        previous = smaller_config.num_slots
        yield words, smaller_config


def overrides_for(config: Config, num_slots: int) -> tuple[str, ...]:
    """Return the first entry of launch.elastic that fits `num_slots` slots; empty if the run fits without,
    and also if none fits: preflight then reports the missing slots."""
    if config.num_slots <= num_slots:
        return ()
    return next((words for words, made in smaller(config) if made.num_slots <= num_slots), ())


def slots_message(config: Config, words: Sequence[str], num_slots: int) -> str:
    """Return a log line about the chosen entry of launch.elastic."""
    return (
        f"{num_slots} of {config.num_slots} slots available: continuing with {' '.join(words)} "
        "(launch.elastic)"
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
        if words := overrides_for(config, num_slots):
            print(slots_message(config, words, num_slots), file=sys.stderr)
            print("\n".join(words))
    except ConfigError as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
