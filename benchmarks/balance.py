"""python -m benchmarks.balance: how long data-parallel ranks wait for each other where they meet at each microbatch.

One rank runs the update's pass over each microbatch of each rank, one after the other, and takes its processor time; the waiting
follows from these times. Two dealings of the same samples: by tokens over the ranks, each of which then packs what it has, and by
cost over ranks and microbatches (mrl/training/balance.py). Lengths are ragged: groups of eight with prompts of 16 to 256 tokens and
geometric responses, 128 on average, at most 512.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mrl.algorithms.objective import cross_entropy
from mrl.capacity.model_facts import find_facts
from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.config.sections.training import TrainingSection
from mrl.prepare.new_model import hf_config
from mrl.samples import TrainBatch
from mrl.training.balance import SampleCost, deal, waiting_share
from mrl.training.packing import split_samples
from mrl.training.worker import MegatronWorker

NEW = NewModelSection(num_layers=8, hidden_size=256, num_experts=16, expert_size=128)
VOCABULARY, LONGEST = 2048, 768


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--microbatch-tokens", type=int, nargs="+", default=[8192, 2048])
    parser.add_argument("--repeats", type=int, default=3, help="passes over each; the fastest counts")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        worker, cost = start(Path(folder))
        for most in options.microbatch_tokens:
            batch = ragged(options.samples, seed=0)
            lengths = batch.lengths().astype(np.int64)
            for name, dealt in (
                ("by tokens", by_tokens(lengths, options.ranks, most)),
                ("by cost", deal(lengths, cost(lengths), ranks=options.ranks, max_tokens=most)),
            ):
                seconds = measure(worker, batch, *dealt, repeats=options.repeats)
                said = waiting_share(cost(lengths), *dealt, ranks=options.ranks)
                print(
                    f"{most} tokens a microbatch, {name}: {told(seconds)}; {said:.2%} by the model's counts",
                    flush=True,
                )
        worker.close()


def write_model(folder: Path) -> None:
    """A random model."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**hf_config(NEW, vocab_size=VOCABULARY, max_length=LONGEST))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))


def start(folder: Path) -> tuple[MegatronWorker, SampleCost]:
    """A rank of a random model, and what its samples cost."""
    write_model(folder)
    model = ModelSection(path=str(folder), max_length=LONGEST)
    training = TrainingSection(dtype="float32", microbatch_tokens=1 << 20)
    worker = MegatronWorker(model, training, rank=0, world_size=1, store=f"tcp://127.0.0.1:{free_port()}")
    return worker, SampleCost.of_model(find_facts(model))


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ragged(count: int, *, seed: int) -> TrainBatch:
    """Samples of random tokens whose responses are to be trained on."""
    random = np.random.default_rng(seed)
    prompts = np.repeat(random.integers(16, 257, -(-count // 8)), 8)[:count]
    lengths = prompts + np.minimum(random.geometric(1 / 128, count), LONGEST - 256)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    inside = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    return TrainBatch(
        tokens=random.integers(2, VOCABULARY, int(bounds[-1])),
        cu_seqlens=bounds.astype(np.int32),
        loss_mask=inside >= np.repeat(prompts, lengths),
        group_ids=np.arange(count) // 8,
        sample_ids=tuple(f"{i // 8}.{i % 8}" for i in range(count)),
    )


def by_tokens(lengths: np.ndarray, ranks: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """[B] ranks and [B] microbatches: the longest sample to the rank with fewest tokens, and each rank packs its own."""
    loads, rank, microbatch = [0] * ranks, np.zeros(len(lengths), int), np.zeros(len(lengths), int)
    for position in np.argsort(-lengths, kind="stable").tolist():
        rank[position] = loads.index(min(loads))
        loads[rank[position]] += int(lengths[position])
    for number in range(ranks):
        mine = np.flatnonzero(rank == number)
        for place, part in enumerate(split_samples(lengths[mine], max_tokens=max_tokens)):
            microbatch[mine[part]] = place
    return rank, microbatch


def measure(
    worker: MegatronWorker, batch: TrainBatch, rank: np.ndarray, microbatch: np.ndarray, *, repeats: int
) -> np.ndarray:
    """[ranks, microbatches] processor seconds of the pass with gradient over each, the fastest of the repeats."""
    seconds = np.zeros((int(rank.max()) + 1, int(microbatch.max()) + 1))
    count = {"num_tokens": int(batch.loss_mask.sum())}
    for at in np.ndindex(seconds.shape):
        part = batch.select(np.flatnonzero((rank == at[0]) & (microbatch == at[1])))
        if not part.num_samples:
            continue
        took = []
        for _ in range(repeats):
            begun = time.process_time()
            worker.accumulate(part, cross_entropy, count)
            took.append(time.process_time() - begun)
        seconds[at] = min(took)
    return seconds


def told(seconds: np.ndarray) -> str:
    """What a table of [ranks, microbatches] seconds means for a pass."""
    whole = float(seconds.max(axis=0).sum())
    waits = 1.0 - seconds.sum(axis=1) / whole
    return (
        f"{seconds.shape[1]} microbatches, a pass of {whole:.2f} s, {1 - seconds.sum() / whole / len(seconds):.1%} of the ranks' "
        f"time is waiting ({waits.max():.1%} of the rank that waits most)"
    )


if __name__ == "__main__":
    main()
