"""Placement of engine processes, and the GPUs they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.config.root import Config
from mrl.launch.workers.placement import Placement
from mrl.rollout.engine_process import EngineProcess


def places(parts: Sequence[EngineProcess], config: Config, placement: Placement) -> dict[str, Any]:
    """Return the placement of these parts' actors, as arguments of ActorGroup. An engine reserves no GPU in
    Ray: its slots are the run's, and their GPUs the trainer ranks' or unreserved."""
    slots = [part.slots(config.engine_slots, tp=config.rollout.tp) for part in parts]
    return {
        "facts": parts,
        "strategies": placement.strategies(part_slots[0] for part_slots in slots),
        "own_environments": [placement.visible(part_slots) for part_slots in slots],
        "slot_share": 0.5,
        "gpus": 0.0,
    }
