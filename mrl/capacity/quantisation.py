"""What quantised engine weights change: the bytes of a parameter, and what people should know."""

from __future__ import annotations

from mrl.capacity.model_facts import row_elements
from mrl.config.root import Config
from mrl.config.sections.rollout import RolloutSection
from mrl.models.facts import Facts
from mrl.models.layout import Layout
from mrl.models.tensors import BLOCK, Row
from mrl.resharding.planner.quantised import cut_inside_blocks, quantises
from mrl.resharding.planner.trainer_manifests import from_layout


def row_bytes(row: Row, element: int, rollout: RolloutSection) -> int:
    """Bytes of an unsplit parameter as engines take it; `element` of one that stays wide."""
    count = row_elements(row)
    if rollout.quantization == "none" or not quantises(row.blocks[0][0].tensor):
        return count * element
    return count + -(-count // BLOCK**2) * 4


def warnings(config: Config, facts: Facts, layout: Layout) -> list[str]:
    """What the configuration says for itself, and tensors the trainer cuts inside blocks."""
    found = config.warnings
    if config.rollout.quantization == "none":
        return found
    if cut := cut_inside_blocks(from_layout(facts.hf, layout), BLOCK):
        found.append(
            f"rollout.quantization = {config.rollout.quantization}: the trainer's layout cuts {len(cut)} tensors inside blocks of {BLOCK} ({min(cut)}, ...): they and the rest "
            "of their modules go whole to every engine rank at every weight sync; a smaller training.layout.tp or etp avoids it"
        )
    return found
