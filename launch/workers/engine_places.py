"""Where the processes of engines live, and what they see there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.config.root import Config
from mrl.launch.workers.placement import Placement
from mrl.rollout.part import Part


def places(parts: Sequence[Part], config: Config, placement: Placement) -> dict[str, Any]:
    """Of the actors of these, as ActorGroup takes it. An engine takes no GPU of Ray's: its slots' trainer ranks have, or nobody, and
    the slots are the run's."""
    slots = [part.slots(config.engine_slots, tp=config.rollout.tp) for part in parts]
    return {
        "told": parts,
        "strategies": placement.strategies(own[0] for own in slots),
        "own_environments": [placement.visible(own) for own in slots],
        "slot_share": 0.5,
        "gpus": 0.0,
    }
