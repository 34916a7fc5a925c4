"""Code that the ranks of the worker tests run, in a module so that spawned ranks can import it."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
import logging.handlers
import queue
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import LayoutSection, OptimizerSection, TrainingSection
from mrl.errors import CheckpointError
from mrl.files import partial_of
from mrl.models.families import family_of
from mrl.models.megatron.layer_modules import RecordingRouter
from mrl.models.tensors import LocalTensor
from mrl.samples import TrainBatch
from mrl.training.checkpoint.atomic_save import Save
from mrl.training.hf import export_folder as hf_export
from mrl.training.hf import hf_folder
from mrl.training.hf import read_values as hf_values
from mrl.training.pass_options import PassOptions
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.tiny_models import random_batch

TEMPERATURE = 0.7


def worker(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    *,
    replays: bool = False,
    max_length: int = 64,
    has_value_head: bool = False,
    **changes: Any,
) -> MegatronWorker:
    """Return a worker of a tiny float32 model with small microbatches, unless changed."""
    fields: dict[str, Any] = {
        "layout": LayoutSection(**layout),
        "dtype": "float32",
        "microbatch_tokens": 64,
        "logprob_chunk_tokens": 20,
        "optimizer": OptimizerSection(lr=1e-3),
        "collective_seconds": 200,
    }
    model = ModelSection(path=folder, max_length=max_length)
    options: dict[str, Any] = {"replays": replays, "has_value_head": has_value_head}
    return worker_of(rank, world, port, model, TrainingSection(**(fields | changes)), **options)


def worker_of(
    rank: int, world: int, port: int, model: ModelSection, training: TrainingSection, **options: Any
) -> MegatronWorker:
    store = f"tcp://127.0.0.1:{port}"
    return MegatronWorker(model, training, rank=rank, world_size=world, store=store, **options)


def shard_of(batch: TrainBatch, at: MegatronWorker) -> tuple[np.ndarray, TrainBatch]:
    """Return this data-parallel rank's sample positions and sub-batch; uneven on purpose."""
    dp = at.layout.dp
    if dp == 1:
        mine = np.arange(batch.num_samples)
    else:  # place 0 takes most samples, so that the others need dummy microbatches
        owner = np.minimum(np.arange(batch.num_samples) // (batch.num_samples // 2 + 2), dp - 1)
        mine = np.flatnonzero(owner == at.place.dp)
    return mine, batch.select(mine)


def digest_parameters(model: TrainedModel) -> str:
    """Return digest_boxes() of a rank's tensors of a model."""
    return digest_boxes((local, tensor) for local, tensor, _, _ in model.local_tensors())


def digest_boxes(held: Iterable[tuple[LocalTensor, torch.Tensor]]) -> str:
    """Return SHA-256 over a rank's checkpoint tensors by stored name, and over others by their own name."""
    pieces = []
    for local, tensor in held:
        boxes = [
            (
                p.tensor,
                p.start,
                tensor[tuple(slice(s, s + n) for s, n in zip(p.local_start, p.shape, strict=True))],
            )
            for p in local.pieces
        ]
        pieces += boxes or [(local.name, (), tensor)]
    total = hashlib.sha256()
    for name, start, values in sorted(pieces, key=lambda box: box[:2]):
        total.update(f"{name} {start}".encode())
        total.update(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digests_of_folder(folder: Path, layout: dict[str, int], *, dtype: str) -> list[str]:
    """Return digest_boxes() of each rank of a layout that loads the folder."""
    hf_config, places = hf_folder.read_config(folder), LayoutSection(**layout).sizes()
    family, digests = family_of(hf_config), []
    for place in places.all_coordinates():
        table = family.local_tensors(hf_config, places, place, dtype=dtype)
        held = [(local, torch.empty(local.shape, dtype=getattr(torch, local.dtype))) for local in table]
        hf_values.load_folder(folder, family, hf_config, held)
        digests.append(digest_boxes(held))
    return digests


def train(at: MegatronWorker, steps: int, *, seed: int = 1) -> list[dict[str, float]]:
    """Run supervised steps on a fixed batch."""
    batch = random_batch(10, seed=seed)
    _, part = shard_of(batch, at)
    count = {"num_tokens": int(batch.loss_mask.sum())}
    return [at.update(part, cross_entropy, count, PassOptions(temperature=TEMPERATURE)) for _ in range(steps)]


def export(at: MegatronWorker, out: str | Path) -> None:
    """Export the ranks' weights as a Hugging Face folder; rank 0 assembles it, and the others do not wait."""
    out = Path(out)
    shards = out.with_name(out.name + ".shards")
    at.save_weights(shards)
    if at.place.rank == 0:
        hf_export.export_checkpoint(shards, out, source=Path(at.model.path), dtype=at.training.dtype)


def forward_update_export(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Export, forward with margins, update twice, export again."""
    at = worker(rank, world, port, folder, layout, **changes)
    export(at, Path(out, "loaded"))
    mine, shard = shard_of(random_batch(10, seed=1), at)
    arrays = at.forward(shard, PassOptions(temperature=TEMPERATURE, with_router_margins=True))
    metrics = train(at, 2)
    export(at, Path(out, "trained"))
    return {
        "samples": mine,
        "arrays": arrays,
        "metrics": metrics,
        "memory": [size for _, size in at.policy.memory.export()],
        "spans": [(i, o, t.numel() * t.element_size()) for _, t, i, o in at.policy.local_tensors()],
    }


def logprobs_of(rank: int, world: int, port: int, folder: str, dtype: str, batch: TrainBatch) -> np.ndarray:
    return worker(rank, world, port, folder, {}, dtype=dtype).forward(batch)["logprobs"]


def kept_hidden_states(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], changes: dict[str, Any]
) -> list[tuple[int, ...]]:
    """Return the shapes of hidden states and their gradients that are alive after an update."""
    at = worker(rank, world, port, folder, layout, **changes)
    train(at, 1)
    gc.collect()
    states = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.dim() == 3 and x.shape[1] == 1]
    size = at.policy.chunks.config.hidden_size
    return [tuple(x.shape) for x in states if x.shape[2] == size]


def hand_made_routers(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int]
) -> dict[str, float]:
    """Return the second update's metrics; layer 0 uses experts 0 and 1, the others all; all is recomputed."""
    at = worker(rank, world, port, folder, layout, microbatch_tokens=10_000, recompute="full")
    routers = [
        m for model in at.policy.chunks.models for m in model.modules() if isinstance(m, RecordingRouter)
    ]
    for router in routers:
        router.gating = _to_two if router.layer_number == 1 else _in_turn
    return train(at, 2)[1]


def _to_two(hidden: torch.Tensor) -> torch.Tensor:
    logits = hidden.new_zeros(*hidden.shape[:2], 8)
    logits[..., :2] = 1.0
    return logits


def _in_turn(hidden: torch.Tensor) -> torch.Tensor:
    """Send token t to experts 2t and 2t + 1, modulo 8."""
    turns = torch.arange(hidden.shape[0]).remainder(4)
    pairs = torch.eye(4).repeat_interleave(2, dim=1)
    return pairs[turns].unsqueeze(1).expand(-1, hidden.shape[1], -1).contiguous()


def load_and_export(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str
) -> list[str]:
    """Export a folder as loaded; return the warnings of loading."""
    records = queue.SimpleQueue[logging.LogRecord]()
    logging.getLogger("mrl").addHandler(logging.handlers.QueueHandler(records))
    at = worker(rank, world, port, folder, layout)
    export(at, out)
    return [records.get().getMessage() for _ in range(records.qsize())]


def reference_role(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> dict[str, Any]:
    """Check that the reference stays fixed while the policy trains, and its swap leaves the policy intact."""
    at = worker(rank, world, port, folder, layout)
    _, shard = shard_of(random_batch(10, seed=1), at)
    before = at.forward(shard)
    errors = []
    try:
        at.forward(shard, PassOptions(role="reference"))
    except ValueError as error:
        errors.append(str(error))
    at.snapshot_reference()
    train(at, 2)
    digest = digest_parameters(at.policy)
    reference, policy = at.forward(shard, PassOptions(role="reference")), at.forward(shard)
    at.policy.memory.lease()
    for action in (lambda: at.forward(shard, PassOptions(role="reference")), at.offload):
        try:
            action()
        except RuntimeError as error:
            errors.append(str(error))
    at.policy.memory.release()
    same = digest == digest_parameters(at.policy)
    return {"before": before, "reference": reference, "policy": policy, "same": same, "errors": errors}


def offload_and_reload(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], dtype: str
) -> dict[str, Any]:
    """Off-load and reload: the shared memory comes back, and training results do not change."""
    at = worker(rank, world, port, folder, layout, dtype=dtype)
    first = train(at, 1)
    digest, resident, generation = (
        digest_parameters(at.policy),
        at.policy.memory.shared_bytes(),
        at.policy.memory.generation,
    )
    at.offload()
    gone = at.policy.memory.shared_bytes()
    refused = ""
    try:
        at.policy.memory.export()
    except RuntimeError as error:
        refused = str(error)
    at.reload()
    same = digest == digest_parameters(at.policy)
    return {
        "metrics": first + train(at, 1),
        "resident": resident,
        "gone": gone,
        "same": same,
        "refused": refused,
        "generations": (generation, at.policy.memory.generation),
    }


def save_then_go_on(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    out: str,
    dtype: str,
    spec: str = "auto",
) -> Any:
    """Train two steps, save, train two more; return the metrics of the last two."""
    at = worker(rank, world, port, folder, layout, dtype=dtype, spec=spec)
    train(at, 2)
    at.save_checkpoint(Path(out, "step-00000002"), {"position": 17, "seeds": np.arange(3)})
    digest = digest_parameters(at.policy)
    torch.rand(3)  # the random states must come from the checkpoint
    drawn = torch.rand(2).tolist()
    metrics = train(at, 2)
    export(at, Path(out, f"after-0-{world}"))
    return {"digest": digest, "metrics": metrics, "drawn": drawn}


def save_beside(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str
) -> dict[str, Any]:
    """Train during a save, which must not change it; then fail rank 1's save: every rank's commit raises."""
    at = worker(rank, world, port, folder, layout)
    train(at, 1)
    good, bad = Path(out, "good"), Path(out, "bad")
    at.save_checkpoint(good, {"step": 1}, beside=True)
    saved = digest_parameters(at.policy)
    train(at, 1)
    seen_before = good.exists()
    at.commit_checkpoint()
    trained = digest_parameters(at.policy)
    at.load_checkpoint(good)
    loaded = digest_parameters(at.policy)
    save = Save(bad, at._states(), extra={}, about=at._about)
    if rank == 1:
        (partial_of(bad) / "__1_0.distcp").mkdir()
    save.write_in_background()
    try:
        save.commit()
        error = ""
    except CheckpointError as refused:
        error = str(refused)
    torch.distributed.barrier()
    left = bad.exists() or partial_of(bad).exists()
    return {
        "saved": saved,
        "trained": trained,
        "loaded": loaded,
        "seen_before": seen_before,
        "error": error,
        "left": left,
    }


def timeouts(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> list[float]:
    worker(rank, world, port, folder, layout, collective_seconds=77.5)
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[attr-defined]
        for group in groups
    ]


def first_draws(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> list[float]:
    worker(rank, world, port, folder, layout)
    return [random.random(), np.random.random(), torch.rand(1).item()]


def memory_of_saves(rank: int, world: int, port: int, folder: str, out: str) -> dict[str, int]:
    """Return how far a save, and one during training, raise peak memory, and the saved file's bytes."""
    at = worker(rank, world, port, folder, {})
    at.save_checkpoint(Path(out, "first"), {})  # makes the moments, and what a first save loads
    peaks = {}
    for name, beside in (("now", False), ("beside", True)):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on (proc(5))
        before = _status("VmRSS")
        at.save_checkpoint(Path(out, name), {}, beside=beside)
        if beside:
            at.commit_checkpoint()
        peaks[name] = _status("VmHWM") - before
    return peaks | {"file": Path(out, "now", "__0_0.distcp").stat().st_size}


def _status(field: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def resume_and_go_on(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    path: str,
    out: str,
    dtype: str,
    spec: str = "auto",
    other: str = "",
) -> Any:
    """Load a checkpoint into a fresh worker, perhaps of another layout, spec or folder; train two steps."""
    at = worker(rank, world, port, folder, layout, dtype=dtype, spec=spec)
    if other:
        at.policy.load_hf(other)
    extra = at.load_checkpoint(path)
    digest = digest_parameters(at.policy)
    torch.rand(3)
    drawn = torch.rand(2).tolist()
    steps = at.policy.optimizer.steps
    metrics = train(at, 2)
    export(at, out)
    return {"digest": digest, "metrics": metrics, "extra": extra, "drawn": drawn, "steps": steps}


def poisoned_update(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> Any:
    """Update with a NaN loss on one rank; normally; with nothing to train on; with a rank without samples."""
    at = worker(rank, world, port, folder, layout)
    batch = random_batch(10, seed=1)
    _, shard = shard_of(batch, at)

    def poison(**fields: Any) -> Any:
        loss, metrics = cross_entropy(**fields)
        return (loss * float("nan"), metrics) if at.place.dp == 1 else (loss, metrics)

    count = {"num_tokens": int(batch.loss_mask.sum())}
    before = digest_parameters(at.policy)
    bad = at.update(shard, poison, count, PassOptions(temperature=TEMPERATURE))
    unchanged = before == digest_parameters(at.policy)
    good = at.update(shard, cross_entropy, count, PassOptions(temperature=TEMPERATURE))
    digest = digest_parameters(at.policy)
    masked = dataclasses.replace(shard, loss_mask=np.zeros_like(shard.loss_mask))
    nothing = at.update(masked, cross_entropy, {"num_tokens": 1})
    unchanged = unchanged and digest == digest_parameters(at.policy)
    lonely = batch if at.place.dp == 0 else batch.select(np.zeros(0, np.int64))
    alone = at.update(lonely, cross_entropy, count, PassOptions(temperature=TEMPERATURE))
    return {"bad": bad, "unchanged": unchanged, "good": good, "nothing": nothing, "alone": alone}


def forward_after_export(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], out: str
) -> Any:
    """Train, export, and return the policy's log-probs."""
    at = worker(rank, world, port, folder, layout)
    train(at, 2)
    export(at, Path(out, "trained"))
    return at.forward(random_batch(10, seed=1))
