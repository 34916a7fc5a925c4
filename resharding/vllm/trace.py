"""Ask a live vLLM worker where its loaders put checkpoint tensors; no bytes move, the model is unchanged.

The model's parameters go to the meta device with the metadata that vLLM keeps for reloading. Its own
`load_weights` gets meta tensors of the full checkpoint shapes, and every copy between views is recorded.
Biases and routers' corrections stay live in a reload; copies into them are recorded but not made. Then the
live parameters are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner import quantised
from mrl.resharding.planner.engine_manifests import TraceRecord, from_trace
from mrl.resharding.planner.manifest import RankManifest

_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")


def without_source(parameter: str) -> bool:
    """Return True for KV-cache scales: vLLM makes and, if the checkpoint has none, sets them itself."""
    return parameter.rpartition(".")[2] in _CACHE_SCALES


def name_loaders(model: Any) -> None:
    """Name weight loaders that have no name (functools.partial): vLLM's reload needs it."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if loader is not None and not hasattr(loader, "__name__"):
            loader.__name__ = type(loader).__name__


def quantised_block(model_config: Any) -> int:
    """Return the edge of the weights' quantised blocks or 0; raise WeightSyncError for other forms."""
    settings: Any = getattr(model_config.hf_config, "quantization_config", None) or {"quant_method": ""}
    if settings.get("quant_method") == "":  # mrl/rollout/quantised.py marks unquantised folders so
        return 0
    rows, cols = settings.get("weight_block_size") or (0, 0)
    if settings.get("quant_method") != "fp8" or rows != cols or not rows:
        raise WeightSyncError(
            f"weight syncs quantise to float8 by square blocks only, but the engine wants {settings}"
        )
    return rows


class _Feeding:
    """Tensors for a model's loaders, which take one after the other."""

    def __init__(self, tensors: Sequence[tuple[str, Any]]) -> None:
        self._tensors = tensors
        self._current = ("nothing", ())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors:
            self._current = (name, tuple(tensor.shape))
            yield name, tensor

    def blame(self, error: Exception, parameters: dict[str, Any]) -> str:
        """Explain a loader's error: the trainer's tensor, its shape, and what the engine has in its place."""
        name, shape = self._current
        module, parts = name, []
        while module and not parts:
            module = module.rpartition(".")[0]
            parts = [f"{n} {tuple(p.shape)}" for n, p in parameters.items() if n.startswith(f"{module}.")]
        reason = f"it has {', '.join(parts[:8])}" if module.count(".") else "it has no such module"
        return (
            f"the engine does not take the trainer's {name} {shape}: {reason} ({type(error).__name__}: "
            f"{error})"
        )


def traced_manifest(
    model: Any, checkpoint: Sequence[CheckpointTensor], *, rank: int, block: int = 0
) -> RankManifest:
    """Run model.load_weights over meta tensors; return the engine manifest of this live worker.

    `block`: edge of the blocks of a quantised engine, which takes values and scales per trainer tensor; else
    0. Raises WeightSyncError for what a plan cannot express: copies other than from checkpoint tensors to
    parameters.
    """
    checkpoint, shared = quantised.quantised_checkpoint(checkpoint, block), aliases(model)
    fed = [
        (t.name, t.as_stored(torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta")))
        for t in checkpoint
    ]
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in fed}
    with _on_meta(model):
        parameters = dict(model.named_parameters())
        targets = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
        recorder, feeding = _Recorder(targets, sources), _Feeding(fed)
        try:
            with torch.no_grad(), recorder:
                model.load_weights(iter(feeding))
        except Exception as error:
            raise WeightSyncError(feeding.blame(error, parameters)) from error
        shapes = {
            name: (tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in parameters.items()
            if not without_source(name)
        }
    if recorder.unexpected:
        raise WeightSyncError(
            f"engine rank {rank}: the loaders copied something other than checkpoint tensors to parameters: "
            f"{recorder.unexpected[:8]}"
        )
    narrow = {tensor.name for tensor in checkpoint if tensor.dtype == quantised.VALUES}
    if wrong := {
        f"{r.tensor} -> {r.parameter} ({shapes[r.parameter][1]})"
        for r in recorder.records
        if (r.tensor in narrow) != (shapes[r.parameter][1] == quantised.VALUES)
    }:  # its loaders would cast
        raise WeightSyncError(f"the engine quantises other tensors than weight syncs do: {sorted(wrong)[:8]}")
    return from_trace(recorder.records, shapes, checkpoint, rank=rank, aliases=shared)


def aliases(model: Any) -> tuple[str, ...]:
    """Return the names under which parameters appear again: a tied output layer's, and those of modules with
    two places. Call it outside a reload, which gives each module its own tensors."""
    seen: dict[int, str] = {}
    again = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            again.append(name)
        seen.setdefault(id(parameter), name)
    return tuple(again)


@contextmanager
def _on_meta(model: Any) -> Iterator[None]:
    layers = list(model.modules())
    name_loaders(model)
    try:
        for layer in layers:
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            restore_layer_on_meta(layer, info)
            for parameter in layer.parameters(recurse=False):
                # A reload leaves its deferring wrapper on the kept metadata; outside a reload it loads
                # nothing.
                if hasattr(parameter, "weight_loader"):
                    parameter.weight_loader = _get_original_loader(parameter)
        yield
    finally:
        for layer in layers:
            info = get_layerwise_info(layer)
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


class _Recorder(TorchDispatchMode):
    """Records every copy_ from a fed tensor's view to a parameter's view, and every change of a fed tensor;
    skips copies from meta tensors of the same shape."""

    def __init__(self, targets: dict[int, str], sources: dict[int, str]) -> None:
        super().__init__()
        self._targets, self._sources = targets, sources
        self.records: list[TraceRecord] = []
        self.unexpected: list[str] = []
        """Copies between anything else, as text: a loader that does more than copy boxes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, frm = args[0], args[1]
            target = self._targets.get(to.untyped_storage()._cdata)
            source = self._sources.get(frm.untyped_storage()._cdata)
            if target is None or source is None or to.shape != frm.shape:
                self.unexpected.append(f"{source} {tuple(frm.shape)} -> {target} {tuple(to.shape)}")
            else:
                to_place = (to.storage_offset(), tuple(to.shape), to.stride())
                self.records.append(
                    TraceRecord(target, *to_place, source, frm.storage_offset(), frm.stride())
                )
            if frm.is_meta and to.shape == frm.shape:
                return to
        elif func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            source = self._sources.get(args[0].untyped_storage()._cdata)
            if source is not None:
                self.unexpected.append(f"{source} is changed before it is copied ({func})")
        return func(*args, **(kwargs or {}))
