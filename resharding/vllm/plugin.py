"""vLLM's side of a weight sync: a registered weight-transfer engine, and the worker calls that drive it.

`worker_extension_cls` makes every worker import this file. vLLM is patched only for what its CPU side lacks
(mrl/cpu), and so that its stores with a loopback address listen only there. The loader of engines that read a
folder themselves is registered here (`folder_loader`). The receive loop runs inside vLLM's own
`update_weights` phase. The protocol is in `receiver.py`, loading into vLLM's modules in `modules.py`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import traceback
from typing import Any

import torch
from vllm import envs
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from mrl.cpu import vllm_kernels
from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor
from mrl.observe.memory_use import memory_use
from mrl.processes.free_memory import release_free_memory
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import Session
from mrl.resharding.vllm.folder_loader import LOAD_FORMAT as LOAD_FORMAT
from mrl.resharding.vllm.modules import PlanLoader
from mrl.resharding.vllm.trace import quantised_block, traced_manifest
from mrl.resharding.wire import loopback_store
from mrl.resharding.wire.cuda_memory import device_uuid

loopback_store.keep_to_loopback()
BACKEND = "mrl"
"""Name in vLLM's WeightTransferConfig."""


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    deadline_seconds: float = 300.0
    host: str | None = None
    """This machine's address for senders that share no memory with its workers."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`session`: the fields of a `Session`."""

    session: dict[str, Any] = dataclasses.field(default_factory=dict)


class SlotEngine(WeightTransferEngine):
    """Weight-transfer engine; one per vLLM worker."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    receiver: Receiver | None = None
    manifest: RankManifest | None = None
    """Where this worker's own loaders put the checkpoint; None before `mrl_manifest`."""
    seconds: dict[str, float] | None = None
    """Seconds of the last committed session by phase."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if self.receiver is None:
            self.receiver = Receiver(
                deadline_seconds=init_info.deadline_seconds, device=self.device, host=init_info.host
            )

    def start_weight_update(self) -> None:
        """Do nothing: the model is touched only after a sender was accepted."""

    def stage(self, session: Session) -> None:
        """Start to take a session's bytes while the engine serves; `receive_weights` loads them."""
        if self.receiver is None:
            raise WeightSyncError("no sender has an address yet; call prepare_sync first")
        self.receiver.stage(session)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take one whole session; return after its commit or raise its error."""
        if self.receiver is None:
            raise WeightSyncError("no sender has an address yet; call prepare_sync first")
        loader = PlanLoader(self.model, self.model_config, self.manifest)
        self.seconds = self.receiver.receive(Session(**update_info.session), loader)

    def finish_weight_update(self) -> None:
        """Do nothing: loading was finished and checked before the commit."""

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class WorkerExtension:
    """Calls that `collective_rpc` makes on every worker. They return errors instead of raising: vLLM's
    executor stops reading at the first worker's failure, and would take the others' late responses for those
    of its next call."""

    weight_transfer_engine: SlotEngine
    device: torch.device
    rank: int

    def mrl_prepare_sync(self, deadline_seconds: float, host: str | None) -> dict[str, Any]:
        """Return {address} for this worker's sender.

        `host`: address of the engine's node; VLLM_HOST_IP, if set, is that of this worker's own node."""
        try:
            host = host and (envs.VLLM_HOST_IP or host)
            self.init_weight_transfer_engine(  # type: ignore[attr-defined]
                {"deadline_seconds": deadline_seconds, "host": host}
            )
            assert self.weight_transfer_engine.receiver is not None
            return {"address": self.weight_transfer_engine.receiver.address}
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_device(self) -> dict[str, Any]:
        """Return {device}: the UUID of this worker's GPU, or "cpu"."""
        return {"device": device_uuid(self.device)}

    def mrl_memory_use(self) -> dict[str, Any]:
        """Return {use}: bytes by name (observe/memory_use.py)."""
        return {"use": memory_use(self.device)}

    def mrl_release_free_memory(self) -> dict[str, Any]:
        """Return memory that a CPU worker no longer uses to the machine, for the slot's trainer."""
        release_free_memory()
        return {}

    def mrl_stage(self, session: dict[str, Any]) -> dict[str, Any]:
        """Start to take a session's bytes while this worker runs steps; `mrl_receive` loads them."""
        try:
            self.weight_transfer_engine.stage(Session(**session))
            return {}
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_receive(self, session: dict[str, Any]) -> dict[str, Any]:
        """Run vLLM's three phases for one session; return {seconds} or {error, serving}.

        `error` is the traceback; `serving` is True if the old weights are still there, because the session
        was refused before it took any bytes."""
        try:
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights({"session": session})  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
            return {"seconds": self.weight_transfer_engine.seconds}
        except Exception:
            receiver = self.weight_transfer_engine.receiver
            serving = receiver is not None and receiver.progress.serving
            return {"error": traceback.format_exc(), "serving": serving}

    def mrl_manifest(self, checkpoint: list[tuple[Any, ...]]) -> dict[str, Any]:
        """Return {manifest}: where this worker's own loaders put each checkpoint tensor (given as fields)."""
        try:
            tensors = [CheckpointTensor(name, tuple(shape), *form) for name, shape, *form in checkpoint]
            engine = self.weight_transfer_engine
            block = quantised_block(engine.model_config)
            engine.manifest = traced_manifest(engine.model, tensors, rank=self.rank, block=block)
            return {"manifest": engine.manifest}
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_drop(self) -> dict[str, Any]:
        """Stop serving, because the worker's weights are gone; the same version may be synced again."""
        if self.weight_transfer_engine.receiver is not None:
            self.weight_transfer_engine.receiver.drop()
        return {}

    def mrl_release_sync(self) -> dict[str, Any]:
        """Unmap the sender's buffers; their owner may free them afterwards."""
        try:
            if self.weight_transfer_engine.receiver is not None:
                self.weight_transfer_engine.receiver.release()
            return {}
        except Exception:
            return {"error": traceback.format_exc()}


def end_with_engine() -> None:
    """Make a vLLM worker process end with its parent; do nothing in other processes.

    vLLM's workers notice a dead parent only between two calls; a thread notices it at any time."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("VllmWorker"):
        return

    started_by = os.getppid()

    def watch() -> None:
        while parent.is_alive() and os.getppid() == started_by:  # a server where it was forked
            parent.join(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="mrl-parent-watch").start()


vllm_kernels.install_kernels()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SlotEngine)

end_with_engine()
