"""Optimizer state that rests in the host's memory and comes to the device piece by piece, for the time of its own update.

Adam works on each element alone, so that an update in pieces is the update of the whole to the last bit. Megatron's own form
(`optimizer_cpu_offload`) computes with the CPU's Adam, whose sums differ from the device's, and cannot run without CUDA.
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
"""Where Megatron's distributed optimizer lists a group's parameters and their master weights; the latter are what it updates."""


class HostState:
    """Stands for one of Megatron's distributed optimizers, with its names; what does not fit `fraction` stays on the device."""

    def __init__(
        self, part: Any, fraction: float, *, device: torch.device, prime: Callable[[Any, Tensor], None]
    ) -> None:
        """Makes the moments and moves them and the master weights to the host. `fraction`: of the bytes; `prime` makes the
        moments of a parameter."""
        self._part = part
        masters = [p for group in part.optimizer.param_groups for p in group["params"]]
        sizes = [_state_bytes(master) for master in masters]
        resting = _first(masters, sizes, fraction * sum(sizes))
        self._pieces = [OptimizerShard(part, own, device) for own in _cut(resting, sizes[: len(resting)])]
        for piece in self._pieces:
            for master in piece.masters:
                prime(part, master)
            piece.leave()
        if stays := masters[len(resting) :]:
            self._pieces.append(OptimizerShard(part, stays, None))

    def resting(self, tensor: Tensor) -> Tensor | None:
        """The copy of a master weight or a moment that is in the host's memory, to be read and written; None for all else."""
        return next((c for piece in self._pieces if (c := piece.copy_of(tensor)) is not None), None)

    def reload_model_params(self) -> None:
        """Copies model parameters into the master weights."""
        self._each(self._part.reload_model_params)

    def step_with_ready_grads(self) -> None:
        """One update, without the gathering of parameters."""
        self._each(self._part.step_with_ready_grads)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what is not a tensor of a state whose tensors were loaded."""
        self._each(lambda: self._part.load_state_dict(state))

    def _each(self, action: Callable[[], object]) -> None:
        """Does something with one piece after the other. All of them find the groups' settings as they were before: Transformer
        Engine counts its steps there, once for each call."""
        groups, left = self._part.optimizer.param_groups, []
        for piece in self._pieces:
            with piece.alone():
                action()
                left += zip(groups, self._part.optimizer.param_groups, strict=True)
        for group, own in left:
            if own["params"]:
                group |= {name: value for name, value in own.items() if name != "params"}


class OptimizerShard:
    """Some master weights of a distributed optimizer with their moments, which are on the device or in the host's memory."""

    def __init__(self, part: Any, masters: list[Tensor], device: torch.device | None) -> None:
        """On the device, where without `device` it stays."""
        self._part, self.masters, chosen = part, masters, set(masters)
        self._params = [[m for m in group["params"] if m in chosen] for group in part.optimizer.param_groups]
        """Of each of the optimizer's groups."""
        self._lists: dict[str, list[list[Tensor]]] = {}
        """Megatron's lists of this piece alone, by their attribute."""
        for models, shards in _SHARDS:
            whole = getattr(part, shards)
            pairs = zip(getattr(part, models), whole, strict=True)
            self._lists[models] = [[m for m, s in zip(*both, strict=True) if s in chosen] for both in pairs]
            self._lists[shards] = [[shard for shard in group if shard in chosen] for group in whole]
        self._copies = None if device is None else HostCopies(device, keep=True)
        self._away: list[Tensor] = []

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """The host's copy of one of this piece's tensors, where the piece is away."""
        return self._copies.copy_of(tensor) if self._copies is not None and self._away else None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The piece on the device, and its optimizer as if it had no other, with copies of the groups; what changed is in the
        host's memory afterwards."""
        self._come()
        part, optimizer = self._part, self._part.optimizer
        groups, states = optimizer.param_groups, optimizer.state
        lists = {name: getattr(part, name) for name in self._lists}
        optimizer.param_groups = [g | {"params": own} for g, own in zip(groups, self._params, strict=True)]
        optimizer.state = defaultdict(dict, {m: states[m] for m in self.masters if m in states})
        for name, own in self._lists.items():
            setattr(part, name, own)
        try:
            yield
        finally:
            states |= optimizer.state
            optimizer.param_groups, optimizer.state = groups, states
            for name, whole in lists.items():
                setattr(part, name, whole)
            self.leave()

    def leave(self) -> None:
        """To the host's memory, where the piece rests there."""
        if self._copies is None:
            return
        self._away = [t for master in self.masters for t in own_tensors(self._part.optimizer, master)]
        self._copies.move_out(self._away)

    def _come(self) -> None:
        if self._copies is not None:
            self._copies.move_back(self._away)
            self._away = []


def own_tensors(optimizer: Any, master: Tensor) -> list[Tensor]:
    """A master weight and its state, as far as they are on its device in storage of their own: in float32 master weights are
    parameters and do not count."""
    values = [master, *optimizer.state.get(master, {}).values()]
    tensors = [v for v in values if torch.is_tensor(v) and v.dim() and v.device == master.device]
    return [t for t in tensors if t.untyped_storage().size() == t.nbytes]


def _state_bytes(master: Tensor) -> int:
    """With two moments in float32, whether they are there yet or not."""
    owns = master.untyped_storage().size() == master.nbytes
    return 8 * master.numel() + owns * master.nbytes


def _first(masters: list[Tensor], sizes: list[int], wanted: float) -> list[Tensor]:
    """The first of them that have so many bytes together, or a little more."""
    taken, total = [], 0
    for master, size in zip(masters, sizes, strict=True):
        if total >= wanted:
            break
        taken.append(master)
        total += size
    return taken


def _cut(masters: list[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    """In runs of PIECE_BYTES at most, or of one."""
    run, total = [], 0
    for master, size in zip(masters, sizes, strict=True):
        if run and total + size > PIECE_BYTES:
            yield run
            run, total = [], 0
        run.append(master)
        total += size
    if run:
        yield run
