"""Runs that others published, simulated: verl's V1 trainers on one model, from docs/advance/v1_async_trainer.md (16 September 2026).

Qwen3.5-35B-A3B, engines of 4 GPUs, DAPO-Math-17k, 64 prompts a step, responses of 12,720 tokens in the mean and 32,768 at most. 8 samples to a
prompt follow from the tokens per second. Three times are fitted to the rows: training, and a decode step's fixed part and its part
for each sequence; four rows must come out of them.
"""

import pytest

from mrl.pool.ledger import Admission
from mrl.simulation.leaves import EngineSpeed, Leaves
from mrl.simulation.load import Load, log_normal
from mrl.simulation.world import World

SAMPLES, MEAN, MOST, PROMPT = 8, 12_720, 32_768, 100
SPEED = EngineSpeed.linear(1024, fixed=0.011, per_sequence=0.011 / 128)
TRAIN_SECONDS = 85.0
"""On four nodes."""


def step_seconds(*, admission: Admission, engines: int, trainer_nodes: int, shares_slots: bool) -> float:
    """Of 64 prompts."""
    tokens = 64 * SAMPLES * (MEAN + PROMPT)
    leaves = Leaves(
        SPEED,
        engines,
        shares_slots,
        train_seconds_per_token=TRAIN_SECONDS / tokens * 4 / trainer_nodes,
        sync_seconds=5.0,
        turn_seconds=5.0 if shares_slots else 0.0,
    )
    load = Load(log_normal(SAMPLES, mean=MEAN, sigma=0.9, most=MOST), prompt_tokens=PROMPT)
    updates = 64 // admission.batch
    world = World(leaves, admission, load)
    world.run(3 * updates)
    return sum(row.seconds for row in world.run(4 * updates)) / 4


ROWS = {
    "sync, 4 nodes, 150 steps": (22.79 / 150, Admission(64), 8, 4, True),
    "colocate_async, 4 nodes, 150 steps": (14.72 / 150, Admission(64, max_age=1), 8, 4, True),
}
"""Row -> (hours of a step, rule, engines, nodes of the trainer, whether slots are shared)."""


@pytest.mark.parametrize("row", ROWS)
def test_a_published_step_comes_out_within_15_percent(row: str) -> None:
    hours, admission, engines, nodes, shared = ROWS[row]
    found = step_seconds(admission=admission, engines=engines, trainer_nodes=nodes, shares_slots=shared)
    assert found == pytest.approx(hours * 3600, rel=0.15)
