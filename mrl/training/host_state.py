"""Optimizer state that stays in host memory and moves to the device in pieces, each for its own update.

Adam works on each element separately, so an update in pieces equals the whole update to the last bit.
Megatron's version (`optimizer_cpu_offload`) computes with the CPU's Adam, whose sums differ from the
device's, and needs CUDA.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mrl.config.sections.training import PIECE_BYTES
from mrl.training.platform.host_copies import HostCopies

_SHARDS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
"""Attributes of Megatron's distributed optimizer: groups' parameters, and the master weights it updates."""


class HostOptimizerState:
    """Replaces one of Megatron's distributed optimizers, under its names; some state stays on the device."""

    def __init__(
        self, part: Any, fraction: float, *, device: torch.device, prime: Callable[[Any, Tensor], None]
    ) -> None:
        """Create the moments; move them and the master weights to the host, at least `fraction` of the bytes.
        `prime` creates a parameter's moments."""
        self._part = part
        masters = [p for group in part.optimizer.param_groups for p in group["params"]]
        sizes = [_state_bytes(master) for master in masters]
        resting = _first_bytes(masters, sizes, fraction * sum(sizes))
        self._pieces = [
            OptimizerShard(part, shard_masters, device)
            for shard_masters in _cut(resting, sizes[: len(resting)])
        ]
        for piece in self._pieces:
            for master in piece.masters:
                prime(part, master)
            piece.move_to_host()
        if stays := masters[len(resting) :]:
            self._pieces.append(OptimizerShard(part, stays, None))

    def resting(self, tensor: Tensor) -> Tensor | None:
        """Return the host copy of a master weight or moment, to read and write; None for other tensors."""
        return next((c for piece in self._pieces if (c := piece.copy_of(tensor)) is not None), None)

    def reload_model_params(self) -> None:
        """Copy model parameters into the master weights."""
        self._each(self._part.reload_model_params)

    def step_with_ready_grads(self) -> None:
        """Take one update, without gathering parameters."""
        self._each(self._part.step_with_ready_grads)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the non-tensors of a state whose tensors are loaded."""
        self._each(lambda: self._part.load_state_dict(state))

    def _each(self, action: Callable[[], object]) -> None:
        """Run an action with one piece after the other. Every piece starts from the same group settings,
        because Transformer Engine counts its steps there, once per call."""
        groups, results = self._part.optimizer.param_groups, []
        for piece in self._pieces:
            with piece.on_device():
                action()
                results += zip(groups, self._part.optimizer.param_groups, strict=True)
        for group, result in results:
            if result["params"]:
                group |= {name: value for name, value in result.items() if name != "params"}


class OptimizerShard:
    """Some master weights of a distributed optimizer with their moments, on the device or in host memory."""

    def __init__(self, part: Any, masters: list[Tensor], device: torch.device | None) -> None:
        """Start on the device; without `device` the piece stays there."""
        self._part, self.masters, chosen = part, masters, set(masters)
        self._params = [[m for m in group["params"] if m in chosen] for group in part.optimizer.param_groups]
        """One list per group of the optimizer."""
        self._lists: dict[str, list[list[Tensor]]] = {}
        """Megatron's lists restricted to this piece, by their attribute."""
        for models, shards in _SHARDS:
            whole = getattr(part, shards)
            pairs = zip(getattr(part, models), whole, strict=True)
            self._lists[models] = [[m for m, s in zip(*both, strict=True) if s in chosen] for both in pairs]
            self._lists[shards] = [[shard for shard in group if shard in chosen] for group in whole]
        self._copies = None if device is None else HostCopies(device, keep=True)
        self._away: list[Tensor] = []

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return the host copy of one of this piece's tensors, if the piece is on the host."""
        return self._copies.copy_of(tensor) if self._copies is not None and self._away else None

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Bring the piece to the device, as its optimizer's only one, with copies of the groups; move it to
        the host afterwards."""
        self._come()
        part, optimizer = self._part, self._part.optimizer
        groups, states = optimizer.param_groups, optimizer.state
        lists = {name: getattr(part, name) for name in self._lists}
        optimizer.param_groups = [
            g | {"params": values} for g, values in zip(groups, self._params, strict=True)
        ]
        optimizer.state = defaultdict(dict, {m: states[m] for m in self.masters if m in states})
        for name, values in self._lists.items():
            setattr(part, name, values)
        try:
            yield
        finally:
            states |= optimizer.state
            optimizer.param_groups, optimizer.state = groups, states
            for name, whole in lists.items():
                setattr(part, name, whole)
            self.move_to_host()

    def move_to_host(self) -> None:
        """Move to host memory, if the piece stays there."""
        if self._copies is None:
            return
        self._away = [t for master in self.masters for t in own_tensors(self._part.optimizer, master)]
        self._copies.move_out(self._away)

    def _come(self) -> None:
        if self._copies is not None:
            self._copies.move_back(self._away)
            self._away = []


def own_tensors(optimizer: Any, master: Tensor) -> list[Tensor]:
    """Return a master weight and its state, if on its device in their own storage: float32 master weights are
    the parameters and do not count."""
    values = [master, *optimizer.state.get(master, {}).values()]
    tensors = [v for v in values if torch.is_tensor(v) and v.dim() and v.device == master.device]
    return [t for t in tensors if t.untyped_storage().size() == t.nbytes]


def _state_bytes(master: Tensor) -> int:
    """Count the bytes of two float32 moments, present or not, and of a separate master weight."""
    owns = master.untyped_storage().size() == master.nbytes
    return 8 * master.numel() + owns * master.nbytes


def _first_bytes(masters: list[Tensor], sizes: list[int], wanted: float) -> list[Tensor]:
    """Return the first master weights that reach `wanted` bytes together."""
    first, total = [], 0
    for master, size in zip(masters, sizes, strict=True):
        if total >= wanted:
            break
        first.append(master)
        total += size
    return first


def _cut(masters: list[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    """Split into runs of at most PIECE_BYTES, or of one tensor."""
    run, total = [], 0
    for master, size in zip(masters, sizes, strict=True):
        if run and total + size > PIECE_BYTES:
            yield run
            run, total = [], 0
        run.append(master)
        total += size
    if run:
        yield run
