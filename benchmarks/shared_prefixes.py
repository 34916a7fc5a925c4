"""python -m benchmarks.shared_prefixes: time an update with shared prefixes against whole sequences, in turn.

One trainer rank updates a random Qwen3-MoE on one group: a prompt and its responses. The wider the model, the
smaller attention's share, and the closer the speed-up to the ratio of the tokens."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.against_trl.bare import free_port
from benchmarks.against_trl.workloads import W2, write_model
from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.samples import TrainBatch
from mrl.training.prefixes import with_shared_prefixes
from mrl.training.worker import MegatronWorker


def group(prompt: int, samples: int, response: int) -> TrainBatch:
    """Return a group of `samples` responses of `response` tokens to one prompt of `prompt` tokens."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, W2.vocabulary, prompt)
    sequences = [np.append(start, rng.integers(0, W2.vocabulary, response)) for _ in range(samples)]
    return TrainBatch(
        tokens=np.concatenate(sequences).astype(np.int32),
        cu_seqlens=np.arange(samples + 1, dtype=np.int32) * (prompt + response),
        loss_mask=np.tile(np.arange(prompt + response) >= prompt, samples),
        group_ids=np.zeros(samples, np.int64),
        sample_ids=tuple(map(str, range(samples))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--samples", type=int, default=16, help="responses of the group")
    parser.add_argument("--response", type=int, default=500, help="tokens of each response")
    parser.add_argument("--hidden", type=int, default=W2.hidden, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=W2.layers, help="number of layers")
    parser.add_argument("--experts", type=int, default=W2.experts, help="experts of twice the hidden width")
    parser.add_argument("--rounds", type=int, default=3, help="updates of each kind")
    options = parser.parse_args()
    batch = group(options.prompt, options.samples, options.response)
    with tempfile.TemporaryDirectory() as folder:
        model = ModelSection(path=f"{folder}/model", max_length=options.prompt + options.response)
        work = dataclasses.replace(
            W2,
            layers=options.layers,
            hidden=options.hidden,
            heads=options.hidden // 32,
            experts=options.experts,
            expert_width=options.hidden * 2,
            prompt_length=options.prompt,
            response_length=options.response,
        )
        write_model(Path(model.path), work)
        training = TrainingSection(dtype="float32", microbatch_tokens=10_000)
        worker = MegatronWorker(model, training, rank=0, world_size=1, store=f"tcp://127.0.0.1:{free_port()}")
        seconds: dict[bool, list[float]] = {False: [], True: []}
        shared = with_shared_prefixes(batch)
        for number in range(options.rounds + 1):
            for shares in seconds:
                part = dataclasses.replace(shared, shares_prefixes=shares)
                started = time.perf_counter()
                worker.update(part, cross_entropy, {"num_tokens": float(batch.loss_mask.sum())})
                if number:  # the first is warm-up
                    seconds[shares].append(time.perf_counter() - started)
        worker.close()
    whole, once = (statistics.median(seconds[shares]) for shares in (False, True))
    print(f"update: whole sequences {whole:.2f} s, shared prefixes {once:.2f} s, {whole / once:.2f} times")


if __name__ == "__main__":
    main()
