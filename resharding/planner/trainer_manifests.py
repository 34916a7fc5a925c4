"""Trainer manifests: all trainer ranks' tensors, from a layout. Pure; the name tables are in models/."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import TRAINER, Spec
from mrl.resharding.planner.manifest import RankManifest


def trainer_rank_manifests(
    hf_config: Mapping[str, Any], layout: Layout, *, dtype: str = "bfloat16", spec: Spec = TRAINER
) -> list[RankManifest]:
    """Build all ranks' manifests from a layout, in rank order, without a model; replicas share tensors."""
    family = family_of(hf_config)
    by_shard: dict[tuple[int, ...], RankManifest] = {}
    manifests = []
    for place in layout.all_coordinates():
        key = (place.tp, place.pp, place.ep, place.etp)
        if key not in by_shard:
            tensors = family.local_tensors(hf_config, layout, place, dtype=dtype, spec=spec)
            by_shard[key] = RankManifest.of(place.rank, tensors)
        manifests.append(dataclasses.replace(by_shard[key], rank=place.rank))
    return manifests
