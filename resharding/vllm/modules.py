"""Weights into vLLM's modules: a plan's copies into parameters, whole tensors through vLLM's loaders.

Both use vLLM's layerwise reload, so every module is processed as at first load and kernel tensors keep their
addresses. A plan writes two classes of modules: *direct* (loader storage is kernel storage: written in place,
`in_place`) and *staged* (materialised at the first window, processed and copied at the last). The protocol is
in `receiver`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from mrl.errors import WeightSyncError
from mrl.resharding.planner.copy_table import CopyTable
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.whole_tensors import whole_tensor_of
from mrl.resharding.transfer.copies import DTYPES, run_copies
from mrl.resharding.transfer.fp8 import whole_tensors
from mrl.resharding.transfer.proof import EngineProof
from mrl.resharding.transfer.slot_tables import Tables
from mrl.resharding.vllm import in_place
from mrl.resharding.vllm.trace import aliases, name_loaders, quantised_block, without_source

_POISON = 0xFF
"""Byte that fills staged parameters first: what a plan leaves out reads as NaN."""


_LOADED_TOGETHER = 256 << 20
"""Bytes of whole tensors staged before vLLM's loaders get them: one call per tensor would take milliseconds
each, and a whole window may be the whole model."""


class PlanLoader:
    """Runs a slot's tables into an engine's modules (`receiver.Consumer`), inside one layerwise reload that
    is checked and finished, or undone."""

    def __init__(self, model: Any, model_config: Any, manifest: RankManifest | None) -> None:
        """`manifest`: from the trace of this worker's own loaders; None if there was no trace."""
        self._model, self._model_config, self.manifest = model, model_config, manifest
        self._block = quantised_block(model_config)
        self._expected: set[str] = set()
        self._loaded: set[str] = set()
        self._tied: set[str] = set()
        """Parameters shared with another module: the output layer if it shares the embedding."""
        self._packed: set[torch.nn.Module] = set()
        self._proof: EngineProof | None = None
        self._tables = Tables((), (), (), ())
        self._flat: list[torch.Tensor | None] = []
        self._open: set[int] = set()
        self._closed: set[int] = set()
        self._written: list[int] = []
        self._direct: set[int] = set()
        self._whole: dict[str, int] = {}
        """By checkpoint tensor that comes whole, as its own module: the index of its target."""
        self._targets: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        """By module: (index among the targets, name) of the parameters that the plan writes."""

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        """Start a reload; raise WeightSyncError if the tables do not fit this model's loader layout."""
        name_loaders(self._model)
        shared = aliases(self._model)
        initialize_layerwise_reload(self._model)
        parameters = dict(self._model.named_parameters())
        self._expected = {name for name in parameters if not without_source(name)}
        self._tied = self._expected.intersection(shared)
        self._tables, self._proof = tables, proof
        self._flat = [None] * len(tables.targets)
        self._written = tables.written()
        for index, target in enumerate(tables.targets):
            owner, _, name = target.name.rpartition(".")
            self._targets[owner].append((index, name))
        self._whole = {w: n for n, t in enumerate(tables.targets) if (w := whole_tensor_of(t.name))}
        planned = [target for target in tables.targets if not whole_tensor_of(target.name)]
        wrong = []
        for target in planned:
            parameter = parameters.get(target.name)
            if parameter is None or (tuple(parameter.shape), parameter.dtype) != (
                target.shape,
                getattr(torch, target.dtype),
            ):
                have = "absent" if parameter is None else f"{tuple(parameter.shape)} {parameter.dtype}"
                wrong.append(f"{target.name}: planned {target.shape} {target.dtype}, here {have}")
        self._loaded = {target.name for target in planned}
        missing = self._expected - self._loaded - self._tied
        if wrong or (missing and not self._whole):
            raise WeightSyncError(
                f"the plan was made for another model: {wrong[:6]}; parameters it does not write: "
                f"{sorted(missing)[:6]}"
            )

    @torch.no_grad()
    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        """Run one window's copies from flat leased tensors and the filled bytes of the bucket."""
        window = self._tables.windows[index]
        opens, closes = set(window.opens), set(window.closes)
        local, unpack = _by_module(window.local), _by_module(window.unpack)
        complete: list[tuple[str, torch.Tensor]] = []
        for module in sorted(
            opens | closes | local.keys() | unpack.keys()
        ):  # one after another: few are staged at once
            if module in opens:
                self._open_module(module, bucket.device)
            run_copies(local.get(module, window.local[:0]), sources, self._flat)
            run_copies(unpack.get(module, window.unpack[:0]), bucket, self._flat)
            if module in closes:
                complete += self._close_module(module)
            if sum(tensor.nbytes for _, tensor in complete) >= _LOADED_TOGETHER:
                self._load(complete)
                complete = []
        self._load(complete)

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load complete tensors through vLLM's own loaders, quantised first if this engine's weights are.

        The reload keeps references to them until a module is complete.
        """
        if tensors:
            self._loaded |= self._model.load_weights(whole_tensors(tensors, self._block)) or set()

    def finish(self) -> None:
        if self._open or len(self._closed) != len(self._tables.modules):
            raise WeightSyncError(
                f"{len(self._open)} modules are still open and {len(self._closed)} of "
                f"{len(self._tables.modules)} closed"
            )
        _require_complete(self._model, self._expected - self._tied, self._loaded)
        finalize_layerwise_reload(self._model, self._model_config)
        # A tied layer's module loaded nothing, and may have derived something from the old weights.
        for name in self._tied:
            in_place.process(self._model.get_submodule(name.rpartition(".")[0]))
        for module in self._model.modules():
            self._pack(module)

    def _pack(self, module: torch.nn.Module) -> None:
        if module not in self._packed:
            in_place.pack_experts(module)
            self._packed.add(module)

    def abort(self) -> None:
        self._flat = []
        put_back(self._model)

    def _open_module(self, number: int, device: torch.device) -> None:
        name = self._tables.modules[number]
        self._open.add(number)
        if name in self._whole:
            target = self._tables.targets[self._whole[name]]
            flat = torch.empty(math.prod(target.shape), dtype=DTYPES[target.dtype], device=device)
            self._flat[self._whole[name]] = flat
            return
        module = self._model.get_submodule(name)
        direct = in_place.is_direct(module)
        if direct:
            in_place.restore(module)
            self._direct.add(number)
        else:
            materialize_layer(module, get_layerwise_info(module))
        for index, parameter in self._targets[name]:
            flat = module.get_parameter(parameter).data.view(-1)
            if not direct:
                flat.view(torch.uint8).fill_(_POISON)
            flat[self._written[index] :].zero_()  # padding, which vLLM's loaders fill so too
            self._flat[index] = flat

    def _close_module(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """Prove and process a module; return the whole tensors that are complete after it."""
        name, flat = self._tables.modules[number], None
        for index, _ in self._targets[name]:
            self._prove(index)
            flat, self._flat[index] = self._flat[index], None
        self._open.discard(number)
        self._closed.add(number)
        if name in self._whole and flat is not None:
            return [(name, flat.view(self._tables.targets[self._whole[name]].shape))]
        module = self._model.get_submodule(name)
        info = get_layerwise_info(module)
        if number in self._direct:
            in_place.process(module)
            self._pack(module)
        elif info.can_load():
            _layerwise_process(module, info)
        return []

    def _prove(self, index: int) -> None:
        """Let the proof digest a target before vLLM processes it; require untouched padding."""
        flat, name = self._flat[index], self._tables.targets[index].name
        if self._proof is None or flat is None:
            return
        self._proof.digest_target(name, flat)
        if flat[self._written[index] :].view(torch.uint8).any():
            raise WeightSyncError(f"{name}: the padding at its end was written")


def _require_complete(model: torch.nn.Module, expected: set[str], loaded: set[str]) -> None:
    """Raise WeightSyncError unless every parameter and module was loaded completely, by the loaders that the
    reload counts and defers. Rows that pad the vocabulary need not be loaded."""
    missing, partial, passed_by = expected - loaded, [], []
    holders = {name.rpartition(".")[0] for name in expected & loaded}
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        total = info.load_numel_total or 0
        if 0 < info.load_numel < total and not isinstance(module, VocabParallelEmbedding):
            partial.append(f"{name} ({info.load_numel} of {total} elements)")
        if info.load_numel == 0 < total and name in holders:
            passed_by.append(name)
    if missing or partial or passed_by:
        raise WeightSyncError(
            f"vLLM did not load everything: {len(missing)} parameters without a source "
            f"{sorted(missing)[:6]}, {len(partial)} modules in part {partial[:6]}; {len(passed_by)} modules "
            "whose tensors were copied past their weight loaders, where a reload loses them "
            f"{passed_by[:6]}; the manifest does not fit this model"
        )


def _by_module(table: CopyTable) -> dict[int, CopyTable]:
    """Split a window's copies by module; tables are in that order."""
    numbers, starts = np.unique(table["module"], return_index=True)
    ends = np.append(starts[1:], len(table))[: len(starts)]
    return {int(n): table[start:end] for n, start, end in zip(numbers, starts, ends, strict=True)}


def put_back(model: torch.nn.Module) -> None:
    """Give half-loaded modules their kernel tensors back; else the next reload would end early, with
    mixed weights."""
    for module in model.modules():
        if get_layerwise_info(module).can_load():
            in_place.restore(module)
