"""What one rank's memory holds in checkpoint terms, with a digest: the planner's only input about ranks.
Pure."""

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
"""Bytes of an element of every dtype that a plan moves, by torch's name without the prefix."""
WIRE_DTYPES = tuple(DTYPE_BYTES)
"""The same by number, as tables of copies name them."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankManifest:
    """One rank's tensors. `rank` numbers trainer ranks and engine ranks each from 0; `digest` hashes the
    tensors alone, so that replicas have the same one."""

    rank: int
    tensors: tuple[LocalTensor, ...]
    digest: str
    unplanned: tuple[str, ...] = ()
    """Checkpoint tensors this rank's loaders take in another way than box by box: they must come whole."""

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
    """Manifests grouped by digest, in order of first rank."""
    groups: dict[str, list[RankManifest]] = {}
    for manifest in manifests:
        groups.setdefault(manifest.digest, []).append(manifest)
    return [Replicas(tuple(m.rank for m in group), group[0].tensors) for group in groups.values()]


def module_of(parameter: str) -> str:
    """The name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def whole_modules(feeds: Mapping[str, Set[str]], unplannable: Set[str]) -> set[str]:
    """The `unplannable` modules and all that share a tensor with one of them, directly or through others:
    what comes whole is loaded into every module it feeds.

    `feeds`: module -> checkpoint tensors that fill it.
    """
    whole = set(unplannable)
    while more := {
        m for m, fed in feeds.items() if m not in whole and any(fed & feeds.get(w, set()) for w in whole)
    }:
        whole |= more
    return whole


def tensor_bytes(tensor: LocalTensor) -> int:
    """Bytes of one local tensor, padding included."""
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def manifest_digest(tensors: Iterable[LocalTensor], unplanned: Iterable[str] = ()) -> str:
    """sha256 over names, shapes, dtypes and pieces, in order, and over the names that come whole."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tensor.chunk} {tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        for piece in tensor.pieces:
            state.update(f"{piece.tensor} {piece.start} {piece.shape} {piece.local_start}\n".encode())
    for name in unplanned:
        state.update(f"whole {name}\n".encode())
    return state.hexdigest()
