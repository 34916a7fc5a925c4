"""Read a checkpoint of adapters: its A and B pairs, and the base weights with them merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.errors import CheckpointError
from mrl.models.adapters import adapter_shapes, changed_tensors
from mrl.models.families import family_of
from mrl.models.hf_config import HfConfig
from mrl.models.kernels.low_rank import merged
from mrl.models.stored_names import StoredBox
from mrl.training.checkpoint.reader import DistributedCheckpoint
from mrl.training.hf.base import lora_section, require_base
from mrl.training.hf.read_values import read_boxes


class AdaptedWeights:
    """Weights of a folder with a checkpoint's adapters merged, as in the trainer."""

    def __init__(
        self, stored: DistributedCheckpoint, source: Path, hf: HfConfig, saved: Mapping[str, Any]
    ) -> None:
        """Open the adapters; `saved` is the manifest's description of them (base.adapter_identity). Raise
        CheckpointError if the checkpoint does not contain these adapters of this folder."""
        require_base(saved, source)
        self.lora, family = lora_section(saved), family_of(hf)
        self._stored, self._source, self._family, self._hf = stored, source, family, hf
        self.has_drafts = False
        self.changed = changed_tensors(family, hf, self.lora)
        """Checkpoint tensor -> stored names of its A and B."""
        shapes, names = (
            adapter_shapes(family, hf, self.lora),
            {n for pair in self.changed.values() for n in pair},
        )
        self._shapes = {name: shapes[name] for name in sorted(names)}
        if stored.shapes() != self._shapes:
            raise CheckpointError(f"{stored.folder} does not contain the adapters in its manifest")
        boxes = (StoredBox(name, (0, 0), shape, (0, 0)) for name, shape in self._shapes.items())
        self._copies = {box.key: stored.copies(box) for box in boxes}

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return whole stored tensors."""
        values = {name: torch.empty(self._shapes[name], dtype=dtype) for name in names}
        self._stored.read((copy, values[name]) for name in values for copy in self._copies[name])
        return values

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Fill checkpoint tensors, each in its type."""
        for dtype in {value.dtype for value in values.values()}:
            self._fill({name: value for name, value in values.items() if value.dtype == dtype}, dtype)

    def _fill(self, values: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        pairs = {name: self.changed[name] for name in values if name in self.changed}
        halves = self.read({half for pair in pairs.values() for half in pair}, dtype)
        names = list(values)
        boxes = [(name, ((0,) * values[name].ndim, tuple(values[name].shape))) for name in names]
        for index, base in read_boxes(self._source, self._family, self._hf, dtype, boxes):
            name = names[index]
            if name in pairs:
                a, b = (halves[half] for half in pairs[name])
                base = merged(base, a, b, scale=self.lora.scale)
            values[name].copy_(base)
