"""Trainer manifests: what every trainer rank holds, from a layout alone or checked against a live model.

Pure: a live model is seen as names, shapes and dtypes; torch is not imported. Does not own the name tables (models/).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from mrl.errors import WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout, Place
from mrl.models.tensors import TRAINER, LocalTensor, Piece, Spec
from mrl.resharding.planner.manifest import RankManifest


class TensorLike(Protocol):
    """What is read of a live parameter."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """One rank's box of a checkpoint tensor."""

    rank: int
    local: LocalTensor
    piece: Piece


def from_layout(
    hf_config: Mapping[str, Any],
    layout: Layout,
    *,
    dtype: str = "bfloat16",
    router_dtype: str | None = None,
    spec: Spec = TRAINER,
    pad_vocab_to: int = 1,
) -> list[RankManifest]:
    """The manifest of every rank of a layout, in rank order, without a model. Replicas share one tuple of tensors."""
    family = family_of(hf_config)
    known: dict[tuple[int, ...], RankManifest] = {}
    manifests = []
    for place in layout.places():
        key = (place.tp, place.pp, place.ep, place.etp)
        if key not in known:
            tensors = family.local_tensors(
                hf_config,
                layout,
                place,
                dtype=dtype,
                router_dtype=router_dtype,
                spec=spec,
                pad_vocab_to=pad_vocab_to,
            )
            known[key] = RankManifest.of(place.rank, tensors)
        manifests.append(dataclasses.replace(known[key], rank=place.rank))
    return manifests


def from_model(
    chunks: Sequence[Mapping[str, TensorLike]],
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


def holders(manifests: Iterable[RankManifest]) -> dict[str, list[Holding]]:
    """For each checkpoint tensor, every box of it that some rank holds, in rank order."""
    found: dict[str, list[Holding]] = {}
    for manifest in manifests:
        for local in manifest.tensors:
            for piece in local.pieces:
                found.setdefault(piece.tensor, []).append(Holding(manifest.rank, local, piece))
    return found
