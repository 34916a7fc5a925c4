"""What one rank's memory holds in checkpoint terms, with a digest: the planner's only input about ranks. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Set
from typing import Any

from mrl.models.tensors import LocalTensor, Piece

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


@dataclasses.dataclass(frozen=True, slots=True)
class RankManifest:
    """One rank's tensors. `rank` numbers trainer ranks and engine ranks each from 0; `digest` hashes the tensors alone, so
    that replicas have the same one."""

    rank: int
    tensors: tuple[LocalTensor, ...]
    digest: str
    unplanned: tuple[str, ...] = ()
    """Checkpoint tensors this rank's loaders take in another way than box by box: they must come whole."""

    @classmethod
    def of(cls, rank: int, tensors: Iterable[LocalTensor], unplanned: Iterable[str] = ()) -> RankManifest:
        tensors, unplanned = tuple(tensors), tuple(sorted(unplanned))
        return cls(rank, tensors, digest_of(tensors, unplanned), unplanned)

    def plain(self) -> dict[str, Any]:
        """Lists, strings and numbers only: for wires that know nothing else (an engine's own calls, JSON)."""
        return {
            "rank": self.rank,
            "unplanned": list(self.unplanned),
            "tensors": [
                [
                    t.name,
                    t.chunk,
                    t.shape,
                    t.dtype,
                    [[p.tensor, p.start, p.shape, p.local_start] for p in t.pieces],
                ]
                for t in self.tensors
            ],
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RankManifest:
        """The manifest that `plain` wrote; the digest is computed again."""
        tensors = [
            LocalTensor(
                name,
                chunk,
                tuple(shape),
                dtype,
                tuple(Piece(n, tuple(a), tuple(b), tuple(c)) for n, a, b, c in pieces),
            )
            for name, chunk, shape, dtype, pieces in data["tensors"]
        ]
        return cls.of(data["rank"], tensors, data["unplanned"])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(tensor_bytes(tensor) for tensor in self.tensors)


def whole_modules(feeds: Mapping[str, Set[str]], odd: Set[str]) -> set[str]:
    """`odd` modules and all that share a tensor with one of them: what comes whole is loaded into every module it feeds.

    `feeds`: module -> checkpoint tensors that fill it.
    """
    found = set(odd)
    while more := {
        m for m, fed in feeds.items() if m not in found and any(fed & feeds.get(o, set()) for o in found)
    }:
        found |= more
    return found


def tensor_bytes(tensor: LocalTensor) -> int:
    """Bytes of one local tensor, padding included."""
    return elements(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def elements(shape: Iterable[int]) -> int:
    """Product of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def digest_of(tensors: Iterable[LocalTensor], unplanned: Iterable[str] = ()) -> str:
    """sha256 over names, shapes, dtypes and pieces, in order, and over the names that come whole."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tensor.chunk} {tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        for piece in tensor.pieces:
            state.update(f"{piece.tensor} {piece.start} {piece.shape} {piece.local_start}\n".encode())
    for name in unplanned:
        state.update(f"whole {name}\n".encode())
    return state.hexdigest()
