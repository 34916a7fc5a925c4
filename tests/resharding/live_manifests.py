"""The manifest of a live trainer rank, from its model's own names and shapes, to hold the name tables to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout, Place
from mrl.models.tensors import TRAINER, Spec
from mrl.resharding.planner.manifest import RankManifest


def from_model(
    chunks: Sequence[Mapping[str, Any]],
    hf_config: Mapping[str, Any],
    layout: Layout,
    place: Place,
    *,
    spec: Spec = TRAINER,
    pad_vocab_to: int = 1,
) -> RankManifest:
    """The manifest of a live rank: the table's boxes with the model's own dtypes.

    `chunks` has, per model chunk, parameter name -> tensor (and the router's `expert_bias` buffer where the family has
    one); wrappers' leading "module." is ignored. WeightSyncError names every missing, unknown or wrongly shaped parameter.
    """
    expected = family_of(hf_config).local_tensors(
        hf_config, layout, place, spec=spec, pad_vocab_to=pad_vocab_to
    )
    live = {(c, _bare(name)): tensor for c, chunk in enumerate(chunks) for name, tensor in chunk.items()}
    table = {(tensor.chunk, tensor.name) for tensor in expected}
    wrong = [
        f"chunk {c} parameter {name} is not in the name table" for c, name in live if (c, name) not in table
    ]
    tensors = []
    for tensor in expected:
        found = live.get((tensor.chunk, tensor.name))
        if found is None:
            wrong.append(f"chunk {tensor.chunk} parameter {tensor.name} is missing from the model")
        elif tuple(found.shape) != tensor.shape:
            wrong.append(
                f"chunk {tensor.chunk} parameter {tensor.name} has shape {tuple(found.shape)}, the table says {tensor.shape}"
            )
        else:
            tensors.append(dataclasses.replace(tensor, dtype=str(found.dtype).removeprefix("torch.")))
    if wrong:
        raise WeightSyncError(
            f"rank {place.rank} does not match the {hf_config.get('model_type')} name table for {layout}: "
            + "; ".join(wrong[:20])
            + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        )
    return RankManifest.of(place.rank, tensors)


def _bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
