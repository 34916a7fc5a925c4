"""One rank's memory in checkpoint terms, with a digest: the planner's only input about ranks. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set

from mrl.models.tensors import LocalTensor

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
"""Bytes per element of every dtype that a plan moves, by torch's name without prefix."""
WIRE_DTYPES = tuple(DTYPE_BYTES)
"""These dtypes by number, as copy tables name them."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankManifest:
    """One rank's tensors. Trainer ranks and engine ranks are each numbered from 0; `digest` hashes only the
    tensors, so replicas have equal ones."""

    rank: int
    tensors: tuple[LocalTensor, ...]
    digest: str
    unplanned: tuple[str, ...] = ()
    """Checkpoint tensors that this rank's loaders do not take box by box: they must come whole."""

    @classmethod
    def of(cls, rank: int, tensors: Iterable[LocalTensor], unplanned: Iterable[str] = ()) -> RankManifest:
        tensors, unplanned = tuple(tensors), tuple(sorted(unplanned))
        return cls(rank, tensors, manifest_digest(tensors, unplanned), unplanned)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(tensor_bytes(tensor) for tensor in self.tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """Ranks with the same manifest."""

    ranks: tuple[int, ...]
    tensors: tuple[LocalTensor, ...]


def replicas(manifests: Sequence[RankManifest]) -> list[Replicas]:
    """Group manifests by digest, in order of first rank."""
    groups: dict[str, list[RankManifest]] = {}
    for manifest in manifests:
        groups.setdefault(manifest.digest, []).append(manifest)
    return [Replicas(tuple(m.rank for m in group), group[0].tensors) for group in groups.values()]


def module_of(parameter: str) -> str:
    """Return the name of a parameter's module."""
    return parameter.rpartition(".")[0]


def whole_modules(feeds: Mapping[str, Set[str]], unplannable: Set[str]) -> set[str]:
    """Return the `unplannable` modules and all that share a tensor with one of them, directly or through
    others: a tensor that comes whole is loaded into every module it feeds.

    `feeds`: module -> checkpoint tensors that fill it.
    """
    whole = set(unplannable)
    while added := {
        m for m, fed in feeds.items() if m not in whole and any(fed & feeds.get(w, set()) for w in whole)
    }:
        whole |= added
    return whole


def tensor_bytes(tensor: LocalTensor) -> int:
    """Return the bytes of one local tensor, padding included."""
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def manifest_digest(tensors: Iterable[LocalTensor], unplanned: Iterable[str] = ()) -> str:
    """Return sha256 over names, shapes, dtypes and pieces, in order, and over the names that come whole."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tensor.chunk} {tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        for piece in tensor.pieces:
            state.update(f"{piece.tensor} {piece.start} {piece.shape} {piece.local_start}\n".encode())
    for name in unplanned:
        state.update(f"whole {name}\n".encode())
    return state.hexdigest()
