"""A plan checks a few ranks and layers, and its answer applies to all of them."""

import json
import random

import pytest

from mrl.capacity.requirements import layout_errors
from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError, WeightSyncError
from mrl.files import CONFIGS
from mrl.models.families import family_of
from mrl.models.hf_config import language_model
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, quantised
from mrl.rollout.quantised import require_whole_blocks

PUBLISHED = sorted(path.parent.name for path in CONFIGS.glob("models/*/config.json"))
LAYERS = 4


def published(name: str) -> dict[str, object]:
    """Return a published configuration with only its first layers."""
    hf = language_model(json.loads((CONFIGS / "models" / name / "config.json").read_text()))
    types = {"layer_types": hf["layer_types"][:LAYERS]} if "layer_types" in hf else {}
    return hf | {"num_hidden_layers": LAYERS} | types


def layouts(seed: int) -> list[Layout]:
    """Return layouts of up to 96 ranks, many of which no model accepts."""
    draw, result = random.Random(seed), []
    while len(result) < 6:
        tp, pp, cp, dp = (draw.choice(sizes) for sizes in ((1, 2, 3, 4), (1, 2, 3), (1, 2), (1, 2, 4)))
        ep = draw.choice([e for e in range(1, tp * cp * dp + 1) if tp * cp * dp % e == 0])
        result.append(Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep))
    return result


def refusal_of_any_rank(hf: dict[str, object], layout: Layout) -> list[str]:
    try:
        for place in layout.all_coordinates():
            family_of(hf).local_tensors(hf, layout, place)
    except ConfigError as error:
        return [str(error)]
    return []


def test_the_first_rank_of_each_stage_speaks_for_all() -> None:
    refused = 0
    for seed, name in enumerate(PUBLISHED):
        hf = published(name)
        for layout in layouts(seed):
            every = refusal_of_any_rank(hf, layout)
            assert layout_errors(hf, layout, lora=None) == every, (name, layout)
            refused += bool(every)
    assert 20 < refused < 6 * len(PUBLISHED) - 20


def cuts_a_block(hf: dict[str, object], layout: Layout) -> bool:
    """Check the manifests of all engine ranks with all their layers."""
    try:
        quantised.manifests(engine_manifests.engine_rank_manifests(hf, layout), "fp8_block")
    except WeightSyncError:
        return True
    return False


def test_one_layer_of_each_kind_shows_a_cut_block() -> None:
    seen = []
    for name in ("Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V3", "Llama-3.1-8B", "Moonlight-16B-A3B-Instruct"):
        for tp in (1, 2, 4, 8):
            hf, rollout = published(name), RolloutSection(tp=tp, quantization="fp8_block")
            seen.append(cuts_a_block(hf, Layout(tp=tp)))
            if not seen[-1]:
                require_whole_blocks(hf, rollout)
                continue
            with pytest.raises(ConfigError, match="must begin on a block of 128"):
                require_whole_blocks(hf, rollout)
    assert 3 < sum(seen) < len(seen) - 3
