"""vLLM's side of a hand-over: a weight-transfer engine registered by name, and the worker calls that drive it.

vLLM is not patched: `worker_extension_cls` makes every worker import this file. The receive loop runs inside vLLM's own
`update_weights` phase. Owns how received tensors enter vLLM's modules (layerwise reload) and how a half-loaded model is
put back; the protocol is in `receiver`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mrl.errors import ReshardError
from resharding.receiver import Receiver
from resharding.session import Session, WireTensor

BACKEND = "mrl"
"""The name in vLLM's WeightTransferConfig."""


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    deadline_seconds: float = 300.0


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`session`: the fields of a `Session`."""

    session: dict[str, Any] = dataclasses.field(default_factory=dict)


class SlotEngine(WeightTransferEngine):
    """One per vLLM worker."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    receiver: Receiver | None = None
    last: dict[str, Any] | None = None
    """What the last committed session reported."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if self.receiver is None:
            self.receiver = Receiver(deadline_seconds=init_info.deadline_seconds, device=self.device)

    def start_weight_update(self) -> None:
        """Nothing: the model is touched only once a sender was accepted."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Takes one whole session, committed or raised."""
        if self.receiver is None:
            raise ReshardError("no sender address was handed out yet; call prepare_sync first")
        self.last = None
        verified = self.receiver.receive(
            Session(**update_info.session), _ModelLoader(self.model, self.model_config)
        )
        self.last = verified.model_dump()

    def finish_weight_update(self) -> None:
        """Nothing: loading was finished and checked before the commit."""

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class _ModelLoader:
    """Feeds complete checkpoint tensors to vLLM's own loaders, module by module (`receiver.Consumer`)."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._expected: set[str] = set()
        self._loaded: set[str] = set()

    def start(self, tensors: Sequence[WireTensor]) -> None:
        initialize_layerwise_reload(self._model)
        self._expected = {name for name, _ in self._model.named_parameters()}

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        # The reload keeps references until a module is complete: these tensors are the receiver's own copies.
        self._loaded |= self._model.load_weights(tensors) or set()

    def finish(self) -> None:
        self._require_complete()
        finalize_layerwise_reload(self._model, self._model_config)
        _pack_experts(self._model)

    def abort(self) -> None:
        """Half-loaded modules get their kernel tensors back; else the next reload would finish early on a mixture."""
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if not info.can_load():
                continue
            if info.kernel_tensors is not None:
                _put_back(module, info.kernel_tensors, info.kernel_non_persistent_buffers)
            info.reset()

    def _require_complete(self) -> None:
        """Every parameter was loaded, and every module whole; padding of the vocabulary is nobody's to load."""
        tied = getattr(self._model_config.hf_config, "tie_word_embeddings", False)
        missing = {n for n in self._expected - self._loaded if not (tied and n.endswith("lm_head.weight"))}
        partial = []
        for name, module in self._model.named_modules():
            info = get_layerwise_info(module)
            total = info.load_numel_total or 0
            if 0 < info.load_numel < total and not isinstance(module, VocabParallelEmbedding):
                partial.append(f"{name} ({info.load_numel} of {total} elements)")
        if missing or partial:
            raise ReshardError(
                f"vLLM did not load everything: {len(missing)} parameters without a source {sorted(missing)[:6]}, "
                f"{len(partial)} modules in part {partial[:6]}; the manifest does not fit this model"
            )


def _put_back(module: torch.nn.Module, kernel_tensors: Any, non_persistent: set[str]) -> None:
    parameters, buffers = kernel_tensors
    for name in [*module._parameters, *module._buffers]:
        if getattr(module, name, None) is not None:
            delattr(module, name)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=name not in non_persistent)


def _pack_experts(model: torch.nn.Module) -> None:
    """vLLM 0.32 packs expert weights for its CPU kernel at the first load and not after a reload: without this call
    the loaded rows would be read as packed ones."""
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)


class WorkerExtension:
    """Calls that `collective_rpc` reaches on every worker. They return errors instead of raising: vLLM's executor stops
    reading at the first worker's failure and would take the others' late answers for those of the next call."""

    weight_transfer_engine: SlotEngine

    def mrl_prepare_sync(self, deadline_seconds: float) -> dict[str, Any]:
        """{address}: where this worker's sender connects."""
        try:
            self.init_weight_transfer_engine({"deadline_seconds": deadline_seconds})  # type: ignore[attr-defined]
            assert self.weight_transfer_engine.receiver is not None
            return {"address": self.weight_transfer_engine.receiver.address}
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_receive(self, session: dict[str, Any]) -> dict[str, Any]:
        """vLLM's three phases for one session; what was received, or the error with its traceback."""
        try:
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights({"session": session})  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
            return dict(self.weight_transfer_engine.last or {})
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_release_sync(self) -> dict[str, Any]:
        """Unmaps the sender's buffers; their owner may free them afterwards."""
        try:
            if self.weight_transfer_engine.receiver is not None:
                self.weight_transfer_engine.receiver.release()
            return {}
        except Exception:
            return {"error": traceback.format_exc()}


def _die_with_parent(parent: int) -> None:
    """vLLM's workers notice a dead parent only between two calls; this thread ends them at any time."""
    while os.getppid() == parent:
        time.sleep(0.25)
    os.kill(os.getpid(), signal.SIGKILL)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SlotEngine)

_parent = multiprocessing.parent_process()
if _parent is not None and multiprocessing.current_process().name.startswith("VllmWorker"):
    threading.Thread(
        target=_die_with_parent, args=(_parent.pid,), daemon=True, name="mrl-parent-watch"
    ).start()
