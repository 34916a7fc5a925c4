"""An engine rank's parameters without an engine: its loader layout, filled by a consumer of windows.

Represents modules whose loader storage is kernel storage: all is written in place, nothing is processed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from benchmarks.resharding.made_up import MadeUp
from mrl.models.tensors import BLOCK, TensorSlice
from mrl.resharding.planner.copy_table import CopyTable
from mrl.resharding.planner.manifest import RankManifest, module_of, tensor_bytes
from mrl.resharding.planner.quantised import VALUES
from mrl.resharding.planner.whole_tensors import whole_tensor_of
from mrl.resharding.transfer.copies import DTYPES, run_copies
from mrl.resharding.transfer.fp8 import whole_tensors
from mrl.resharding.transfer.proof import EngineProof
from mrl.resharding.transfer.slot_tables import Tables, Target

_POISON = 0xFF


class Storage:
    """Parameters of one rank."""

    def __init__(self, manifest: RankManifest, device: torch.device) -> None:
        self.manifest, self.device = manifest, device
        self._block = BLOCK if any(t.dtype == VALUES for t in manifest.tensors) else 0
        self.flat = {
            t.name: torch.empty(tensor_bytes(t), dtype=torch.uint8, device=device).view(DTYPES[t.dtype])
            for t in manifest.tensors
        }
        self.poison()
        self._pieces: dict[str, list[tuple[str, TensorSlice]]] = {}
        for tensor in manifest.tensors:
            for piece in tensor.pieces:
                self._pieces.setdefault(piece.tensor, []).append((tensor.name, piece))
        self._shaped = {t.name: self.flat[t.name].view(t.shape) for t in manifest.tensors}

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    def poison(self) -> None:
        for flat in self.flat.values():
            flat.view(torch.uint8).fill_(_POISON)

    def first_difference(self, made: MadeUp) -> str | None:
        """Return the first difference from the made-up checkpoint, or None."""
        differences = (made.first_difference(t, self.flat[t.name]) for t in self.manifest.tensors)
        return next((difference for difference in differences if difference), None)

    def load(self, name: str, full: torch.Tensor) -> None:
        """Copy this rank's boxes from a whole checkpoint tensor, quantising like an engine's loaders."""
        for part, tensor in whole_tensors([(name, full)], self._block):
            self._load(part, tensor)

    def _load(self, name: str, full: torch.Tensor) -> None:
        for parameter, piece in self._pieces.get(name, []):
            extra = self._shaped[parameter].ndim - len(piece.shape)
            target, source = self._shaped[parameter][piece.local_start[:extra]], full
            for dim, (to, at, size) in enumerate(
                zip(piece.local_start[extra:], piece.start, piece.shape, strict=True)
            ):
                target, source = target.narrow(dim, to, size), source.narrow(dim, at, size)
            target.copy_(source)

    def copy_plainly(self, sources: Sequence[torch.Tensor]) -> None:
        """Write every parameter once by straight copies from `sources` (flat uint8), read in a cycle."""
        number, at = 0, 0
        for flat in self.flat.values():
            target, done = flat.view(torch.uint8), 0
            while done < target.numel():
                size = min(sources[number].numel() - at, target.numel() - done)
                target[done : done + size].copy_(sources[number][at : at + size])
                done, at = done + size, at + size
                if at == sources[number].numel():
                    number, at = (number + 1) % len(sources), 0


class StorageConsumer:
    """Fills a storage by a session's windows (`receiver.Consumer`)."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._tables = Tables((), (), (), ())
        self._flat: list[torch.Tensor] = []
        self._proof: EngineProof | None = None

    @property
    def manifest(self) -> RankManifest:
        return self._storage.manifest

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        self._tables, self._proof = tables, proof
        self._flat = [self._room(target) for target in tables.targets]

    def _room(self, target: Target) -> torch.Tensor:
        """Return where a target is written: its parameter, or new memory for a tensor that comes whole."""
        if whole_tensor_of(target.name) is None:
            return self._storage.flat[target.name]
        return torch.empty(math.prod(target.shape), dtype=DTYPES[target.dtype], device=self._storage.device)

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        window = self._tables.windows[index]
        self._read(window.local, sources)
        run_copies(window.unpack, bucket, self._flat)
        closed = {self._tables.modules[number] for number in window.closes}
        for target, flat in zip(self._tables.targets, self._flat, strict=True):
            if module_of(target.name) not in closed:
                continue
            if self._proof is not None:
                self._proof.digest_target(target.name, flat)
            if whole := whole_tensor_of(target.name):
                self._load(whole, flat.view(target.shape))

    def _read(self, table: CopyTable, sources: Sequence[torch.Tensor]) -> None:
        """Run the copies from leased memory."""
        run_copies(table, sources, self._flat)

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        """Load a tensor that came whole."""
        self._storage.load(name, tensor)

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass
