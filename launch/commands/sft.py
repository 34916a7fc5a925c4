"""The supervised start, SPMD under torchrun, without Ray: `torchrun --nproc-per-node N -m mrl.launch.commands.sft CONFIG...`.

`mrl sft CONFIG...` starts torchrun on this machine with as many ranks as the training layout has.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.config.sections.sft import SftSection
from mrl.data.files import read_rows
from mrl.errors import ConfigError, DataError
from mrl.launch.workers.actor_log import redirect, screen
from mrl.launch.workers.spmd import run_torchrun, start_worker
from mrl.samples import TrainBatch


def run_ranks(arguments: Sequence[str]) -> int:
    """torchrun on this machine; the exit code is torchrun's. Model and data are checked before ranks start."""
    from mrl.launch.commands.check import check_policy, check_tokenizer
    from mrl.training.hf.export import require_new

    config = load_config(*arguments)
    section = _section(config)
    require_new(Path(section.output))
    check_policy(config)
    check_tokenizer(config)
    rows = demonstrations(section.data)
    print(f"sft: {len(rows)} rows, {section.steps} steps of {section.batch_rows}")
    code = run_torchrun("mrl.launch.commands.sft", arguments, config)
    if code:
        print(f"sft failed with {code}; each rank's own words are in {log_folder(config)}", flush=True)
    return code


def log_folder(config: Config) -> Path:
    """Where each rank writes what it and the libraries under it have to say."""
    return Path(config.run_folder).resolve() / "logs" / "sft"


def main(arguments: Sequence[str]) -> None:
    """One rank: its figures are for the screen, all else for its log file, its end by an error for both."""
    config, seen, rank = load_config(*arguments), screen(), int(os.environ["RANK"])
    redirect(str(log_folder(config)), f"rank-{rank}")
    try:
        _train(config, seen, rank)
    except Exception as error:
        print(f"sft, rank {rank}: {type(error).__name__}: {error}", file=seen, flush=True)
        raise


def _train(config: Config, seen: TextIO, rank: int) -> None:
    from mrl.algorithms.objective import cross_entropy
    from mrl.data.tokenise import load_tokenizer
    from mrl.training.hf import export

    section = _section(config)
    training = config.training.model_copy(update={"optimizer": section.optimizer.in_updates(1)})
    worker = start_worker(config, training=training)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    sequences = encode(demonstrations(section.data), tokenizer)
    dp, start = worker.layout.dp, time.monotonic()
    for step in range(1, section.steps + 1):
        batch = rows_of_step(sequences, section, step=step, seed=config.run.seed)
        shard = batch.select(np.arange(worker.place.dp, batch.num_samples, dp))
        metrics = worker.update(shard, cross_entropy, {"num_tokens": float(batch.loss_mask.sum())})
        if rank == 0 and (step % 20 == 0 or step == section.steps):
            print(
                f"sft {step}/{section.steps}  loss {metrics['loss']:.4f}  {time.monotonic() - start:.0f} s",
                file=seen,
                flush=True,
            )
    shards = Path(section.output).with_name(Path(section.output).name + ".shards")
    worker.save_weights(shards)
    worker.close()
    if rank == 0:
        export.export_checkpoint(
            shards, Path(section.output), source=Path(config.model.path), dtype=training.dtype
        )
        shutil.rmtree(shards)


def demonstrations(path: str) -> list[tuple[str, str]]:
    """(prompt, response) of every row of a data file; DataError names a bad row by file and line."""
    pairs = []
    for place, row in read_rows(path):
        if absent := [name for name in ("prompt", "response") if name not in row]:
            raise DataError(
                f"{place}: a row of sft.data has a prompt and a response, this one has no {absent[0]!r}"
            )
        pairs.append((str(row["prompt"]), str(row["response"])))
    return pairs


def encode(rows: Sequence[tuple[str, str]], tokenizer: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens [T], loss mask [T]) of prompt, response and end of text."""
    sequences = []
    for prompt, response in rows:
        left = tokenizer.encode(prompt, add_special_tokens=False)
        right = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        sequences.append((np.array(left + right), np.array([False] * len(left) + [True] * len(right))))
    return sequences


def rows_of_step(
    sequences: Sequence[tuple[np.ndarray, np.ndarray]], section: SftSection, *, step: int, seed: int
) -> TrainBatch:
    """The batch of a step, drawn by (seed, step) alone."""
    chosen = np.random.default_rng((seed, step)).integers(len(sequences), size=section.batch_rows)
    lengths = [len(sequences[i][0]) for i in chosen]
    return TrainBatch(
        tokens=np.concatenate([sequences[i][0] for i in chosen]).astype(np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=np.concatenate([sequences[i][1] for i in chosen]),
        group_ids=np.arange(len(chosen), dtype=np.int64),
        sample_ids=tuple(f"row{i}" for i in chosen),
    )


def _section(config: Config) -> SftSection:
    if config.sft is None:
        raise ConfigError("the configuration has no sft section; it needs data, output and steps")
    return config.sft


if __name__ == "__main__":
    main(sys.argv[1:])
