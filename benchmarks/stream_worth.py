"""python -m benchmarks.stream_worth: when a stream pays, simulated, by how many requests an engine has and what training takes.

16 slots, an engine on each of those that engines have; 16 samples a prompt, lengths log-normal (sigma 0.9, cut at four times the mean), decode steps that
take 1.5 times as long with 64 sequences as with one. Training takes the stated share of an on_policy step on shared slots. Each figure is
tokens per second against on_policy; of splits the best of all.
"""

from __future__ import annotations

import dataclasses

from mrl.pool.ledger import Admission
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.world import World

SLOTS, SAMPLES, MEAN = 16, 16, 2000
SPEED = EngineSpeed.linear(128, 0.01, 0.01 / 128)
AGES = (1, 2, 4)


def main() -> None:
    load = Load(log_normal(SAMPLES, mean=MEAN, sigma=0.9, most=4 * MEAN), prompt_tokens=200)
    print(
        "requests of an engine, training | shared slots at age 1, 2, 4 | own slots, best split, at age 1, 2, 4"
    )
    for requests in (128, 32, 16):
        batch = requests * SLOTS // SAMPLES
        for share in (0.1, 0.3, 0.5):
            shared = _with_share(batch, load, share)
            base = _rate(shared, Admission(batch), load)
            together = [_rate(shared, Admission(batch, age), load) / base for age in AGES]
            splits = [_placed(shared, engines) for engines in range(2, SLOTS, 2)]
            apart = [max(_rate(s, Admission(batch, age), load) for s in splits) / base for age in AGES]
            worst = min(_rate(s, Admission(batch, 2), load) for s in splits) / base
            cells = [" ".join(f"{each:.2f}" for each in row) for row in (together, apart)]
            print(
                f"{requests:>4} {share:4.0%} | {cells[0]} | {cells[1]} | worst split at age 2: {worst:.2f}",
                flush=True,
            )


def _with_share(batch: int, load: Load, share: float) -> Leaves:
    """Shared slots where training takes this share of an on_policy step."""
    free = Leaves(SPEED, SLOTS, True)
    rows = World(free, Admission(batch), load).run(4)
    seconds, tokens = sum(row.seconds for row in rows), sum(row.tokens for row in rows)
    return dataclasses.replace(free, train_seconds_per_token=seconds * share / (1 - share) / tokens)


def _placed(shared: Leaves, engines: int) -> Leaves:
    slower = SLOTS / (SLOTS - engines)
    return dataclasses.replace(
        shared,
        num_engines=engines,
        shares_slots=False,
        train_seconds_per_token=shared.train_seconds_per_token * slower,
    )


def _rate(leaves: Leaves, admission: Admission, load: Load) -> float:
    """Tokens per second, after the steps in which engines get ahead."""
    world = World(leaves, admission, load)
    world.run(max(AGES) + 2)
    rows = world.run(6)
    return sum(row.tokens for row in rows) / sum(row.seconds for row in rows)


if __name__ == "__main__":
    main()
