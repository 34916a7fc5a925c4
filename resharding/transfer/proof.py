"""The end-to-end proof of a weight sync: digests of cells of the trainer's and the engine's parameters.

Neither end uses the plan's tables, the buckets or the leases: each finds a cell in its own memory by its own
manifest, so any fault between the two ends makes a difference. Not cryptographic. `cells` defines the cells.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from mrl.errors import WeightSyncError
from mrl.models.tensors import SCALES, LocalTensor
from mrl.resharding.planner.boxes import Box
from mrl.resharding.planner.cells import AnsweredCell, Cell, CellPlaces, PlanCells, StridedRun, require_tiled
from mrl.resharding.planner.manifest import RankManifest, module_of
from mrl.resharding.planner.whole_tensors import whole_target, whole_tensor_of
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.fp8 import quantised
from mrl.resharding.transfer.slot_tables import Target
from mrl.resharding.wire.digest import matrix_digests

_NAMED = 6
"""Number of cells that an error names."""

ReadBoxes = Callable[[Sequence[tuple[str, Box]]], Iterator[tuple[int, torch.Tensor]]]
"""Boxes of checkpoint tensors -> (index, the box's values in the trainer's dtype), in any order."""


class TrainerProof:
    """One trainer rank's share of a proof: digests of its own parameters in the cells it answers for."""

    def __init__(
        self, plan_cells: PlanCells, rank: int, tensors: Sequence[LocalTensor], receivers: Sequence[int]
    ) -> None:
        """`tensors`: the rank's manifest, in the order of its arrays. `receivers`: engine ranks it feeds."""
        places = CellPlaces(tensors)
        self._answers: dict[int, AnsweredCell] = {}
        self._runs: dict[int, StridedRun] = {}
        self._by_tensor: dict[int, list[int]] = {}
        for number, answer in plan_cells.answered(rank).items():
            index, run = places.one_of(answer.tensor, answer.box)
            self._answers[number], self._runs[number] = answer, run
            self._by_tensor.setdefault(index, []).append(number)
        self._count = plan_cells.count
        self.needed = {receiver: plan_cells.needed(receiver) for receiver in receivers}
        """By engine rank: its cells, by number."""

    def exchange_digests(
        self, arrays: Sequence[torch.Tensor], ranks: RankGroup, receivers: Iterable[int] | None = None
    ) -> list[str]:
        """Return each receiver's cell digests over all ranks' parameters; all ranks call it together.

        `arrays`: this rank's parameters, flat. `receivers`: default all. A cell's digest is computed on one
        rank and 0 on the others, so that a sum exchanges them."""
        total = ranks.all_reduce_sum(lambda: torch.from_numpy(self._digests(arrays).view(np.int64)))
        chosen = self.needed if receivers is None else receivers
        digests = total.numpy().view(np.uint64)
        return [encoded(digests[np.array(list(self.needed[receiver]), np.int64)]) for receiver in chosen]

    def require_loaded(self, arrays: Sequence[torch.Tensor], read: ReadBoxes) -> None:
        """Raise WeightSyncError if the parameters differ from what `read` returns for the cells' names."""
        actual, numbers = self._digests(arrays), list(self._answers)
        device = arrays[0].device if arrays else torch.device("cpu")
        seen: list[int] = []

        def stored() -> Iterator[torch.Tensor]:
            for index, values in read([(self._answers[n].tensor, self._answers[n].box) for n in numbers]):
                seen.append(numbers[index])
                row = values.reshape(1, -1).to(device)  # digests differ between kinds of device
                yield _in_form(self._answers[numbers[index]], row)

        digests = matrix_digests(stored())
        pairs = zip(seen, digests, strict=True)
        wrong = [str(self._answers[n].cell) for n, digest in pairs if digest != actual[n]]
        if wrong:
            raise WeightSyncError(
                f"the trainer's parameters differ from the folder it loaded in {len(wrong)} boxes: "
                f"{wrong[:_NAMED]}"
            )

    def _digests(self, arrays: Sequence[torch.Tensor]) -> np.ndarray:
        """Return [cells] uint64: digests of the cells that this rank answers for, 0 for the others."""
        placed = [(n, arrays[index]) for index, numbers in self._by_tensor.items() for n in numbers]
        result = np.zeros(self._count, np.uint64)
        result[[n for n, _ in placed]] = matrix_digests(
            _in_form(self._answers[n], self._runs[n].of(held)) for n, held in placed
        )
        return result


def _in_form(answer: AnsweredCell, held: torch.Tensor) -> torch.Tensor:
    """Return a matrix as engine ranks hold it: unchanged if the bytes are the same, else cast, or quantised
    in the rows of its tensor (a run may have joined them)."""
    if answer.block:
        return quantised(held.reshape(answer.box[1]), answer.dtype, answer.block)
    return held.to(DTYPES[answer.dtype])


class EngineProof:
    """One engine rank's share of a proof: digests of its cells, in loader layout or in its loaders' input."""

    def __init__(self, cells: Sequence[Cell], targets: Sequence[Target], manifest: RankManifest) -> None:
        """Find the cells in what a session writes.

        Args:
            cells: cells that this rank needs, according to the trainer.
            targets: targets of the session's tables; they describe whole tensors.
            manifest: this rank's own; it says where boxes are in its parameters.

        Raises:
            WeightSyncError: the cells do not cover the whole manifest.
        """
        self._cells = tuple(cells)
        self._places: dict[str, list[tuple[int, StridedRun]]] = {}
        self._place(targets, manifest)
        self._expected = sum(len(runs) for runs in self._places.values())
        self._seen: list[tuple[int, int]] = []

    def _place(self, targets: Sequence[Target], manifest: RankManifest) -> None:
        where, cells = f"engine rank {manifest.rank}", self._cells
        whole = {name: target for target in targets if (name := whole_tensor_of(target.name))}
        modules = {module_of(target.name) for target in targets}
        planned = [whole_target(name, target.shape, target.dtype) for name, target in whole.items()]
        needed = [("its loaders", manifest.unplanned)]
        for tensor in manifest.tensors:
            if module_of(tensor.name) in modules:
                planned.append(tensor)
            else:
                needed.append((tensor.name, tuple(p.tensor for p in tensor.pieces)))
        for reader, names in needed:
            if missing := {name for name in names if not name.endswith(SCALES)} - whole.keys():
                raise WeightSyncError(
                    f"{where}: {sorted(missing)} of {reader} are neither planned nor come whole"
                )
        require_tiled(((p.tensor, (p.start, p.shape)) for t in planned for p in t.pieces), cells, where)
        places = CellPlaces(planned)
        for number, cell in enumerate(cells):
            runs = places.all_of(cell.tensor, cell.box)
            if not runs:
                raise WeightSyncError(
                    f"{where} has no place for {cell}, which it needs according to the trainer"
                )
            for index, run in runs:
                self._places.setdefault(planned[index].name, []).append((number, run))

    def start(self) -> None:
        """Forget what an earlier session wrote."""
        self._seen = []

    def digest_target(self, target: str, flat: torch.Tensor) -> None:
        """Digest a target of the tables, after its last byte is written and before it is processed."""
        placed = self._places.get(target, [])
        digests = matrix_digests(run.of(flat) for _, run in placed)
        self._seen += zip((number for number, _ in placed), digests, strict=True)

    def compare(self, text: str) -> None:
        """Raise WeightSyncError if a digest differs from `text` (`TrainerProof.exchange_digests`)."""
        expected = decoded(text, len(self._cells)).tolist()
        if len(self._seen) != self._expected:
            raise WeightSyncError(
                f"the proof digested {len(self._seen)} of {self._expected} boxes of the engine"
            )
        if wrong := [str(self._cells[number]) for number, digest in self._seen if digest != expected[number]]:
            raise WeightSyncError(
                f"{len(wrong)} of {self._expected} boxes in the engine differ from the trainer's parameters: "
                f"{wrong[:_NAMED]}"
            )


def encoded(digests: np.ndarray) -> str:
    """Return uint64 digests as base64 text."""
    return base64.b64encode(digests.astype("<u8").tobytes()).decode()


def decoded(text: str, count: int) -> np.ndarray:
    """Return the `count` digests in a text of `encoded`; raise WeightSyncError for any other text."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise WeightSyncError(f"a malformed proof: {error}") from error
    if len(data) != 8 * count:
        raise WeightSyncError(f"a malformed proof: {len(data)} bytes for {count} cells, expected {8 * count}")
    return np.frombuffer(data, "<u8")
