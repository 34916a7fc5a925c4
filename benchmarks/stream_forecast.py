"""python -m benchmarks.stream_forecast: the measured schedules of docs/benchmarks.md, forecast from the on_policy line of each table.

The lengths are those of the measurements, response by response. Of the on_policy line two figures are used: what a step waits for
its groups gives the decode step (with 64 sequences 1.5 times as long as with one: assumed), the rest of the step the trainer's rate.
"""

from __future__ import annotations

import dataclasses

from mrl.launch.commands.bench_load import LogNormalLengths
from mrl.pool.ledger import Admission
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.world import StepTimes, World

BATCH, SAMPLES, MEAN, MOST, PROMPT = 16, 8, 48, 384, 6
WARM_UP, STEPS = 3, 16


class MeasuredLoad(Load):
    """The lengths of `mrl bench stream`."""

    def __init__(self) -> None:
        super().__init__(log_normal(SAMPLES, mean=MEAN, sigma=0.9, most=MOST), prompt_tokens=PROMPT)
        self._lengths = LogNormalLengths(MEAN, 0.9, MOST, seed=0)

    def lengths(self, index: int) -> list[int]:
        return [self._lengths(index, sample) for sample in range(SAMPLES)]


@dataclasses.dataclass(frozen=True)
class Table:
    """One of docs/benchmarks.md: mean seconds."""

    name: str
    engines: int
    concurrency: int
    shares_slots: bool
    step: float
    """Of on_policy."""
    waiting: float
    """Of on_policy, for its groups."""
    by_age: dict[int, float]
    """Of streams, which the forecast does not use."""


TABLES = (
    Table("colocated", 2, 256, True, 3.006, 1.902, {2: 2.496}),
    Table("separate", 1, 384, False, 2.000, 1.095, {1: 1.361, 2: 1.165}),
)


def main() -> None:
    load = MeasuredLoad()
    print("slots, max_age: forecast and measured mean seconds of a step")
    for table in TABLES:
        leaves = _calibrated(table, load)
        for age, measured in table.by_age.items():
            found = _mean([row.seconds for row in _steps(leaves, age, load)])
            print(f"{table.name}, {age}: {found:.3f} and {measured:.3f}, {found / measured - 1:+.0%}")


def _calibrated(table: Table, load: Load) -> Leaves:
    unit = Leaves(EngineSpeed.linear(table.concurrency, 1.0, 0.5 / 64), table.engines, table.shares_slots)
    rows = _steps(unit, 0, load)
    one = table.waiting / _mean([row.waited_seconds for row in rows])
    return dataclasses.replace(
        unit,
        engine=EngineSpeed.linear(table.concurrency, one, one * 0.5 / 64),
        train_seconds_per_token=(table.step - table.waiting) / _mean([row.tokens for row in rows]),
    )


def _steps(leaves: Leaves, age: int, load: Load) -> list[StepTimes]:
    return World(leaves, Admission(BATCH, age), load, by_index=not age).run(WARM_UP + STEPS)[WARM_UP:]


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
