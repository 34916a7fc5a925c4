"""python -m benchmarks.reference_pass: a step's update with the reference's pass before it as a call of its own, and in the
update's own call, where no pipeline stage waits for another between the two.

Two pipeline stages, one thread each, of a random model; ragged samples (benchmarks/balance.py); the two in turn, and the median of
their wall time from the moment that both ranks are there until both are done.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.balance import LONGEST, free_port, ragged, write_model
from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import LayoutSection, TrainingSection
from mrl.training.pass_options import PassOptions
from mrl.training.worker import MegatronWorker

STAGES = 2
DEADLINE = 1800.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_pass", description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--microbatch-tokens", type=int, nargs="+", default=[4096, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for tokens in options.microbatch_tokens:
            apart, beside, number = _of_all_stages(folder, options.samples, tokens, options.rounds)
            print(
                f"{number} microbatches of {tokens} tokens at most: {apart:.2f} s with a call of its own, {beside:.2f} s in the "
                f"update's ({1 - beside / apart:.1%} less)",
                flush=True,
            )


def _of_all_stages(folder: str, samples: int, tokens: int, rounds: int) -> tuple[float, float, int]:
    context, port = multiprocessing.get_context("spawn"), free_port()
    with context.Pool(STAGES) as pool:
        waiting = [pool.apply_async(stage, (r, port, folder, samples, tokens, rounds)) for r in range(STAGES)]
        return waiting[0].get(DEADLINE)


def stage(
    rank: int, port: int, folder: str, samples: int, tokens: int, rounds: int
) -> tuple[float, float, int]:
    """Seconds apart and beside, and how many microbatches there are; of one rank."""
    layout = LayoutSection(pp=STAGES)
    worker = MegatronWorker(
        ModelSection(path=folder, max_length=LONGEST),
        TrainingSection(dtype="float32", layout=layout, microbatch_tokens=tokens, num_threads=1),
        rank=rank,
        world_size=STAGES,
        store=f"tcp://127.0.0.1:{port}",
    )
    worker.snapshot_reference()
    batch = ragged(samples, seed=0)
    count = {"num_tokens": int(batch.loss_mask.sum())}

    def apart() -> None:
        worker.forward(batch, PassOptions(role="reference"))
        _together()  # the driver has the arrays of all ranks before it sends the update
        worker.accumulate(batch, cross_entropy, count)

    def beside() -> None:
        worker.accumulate(batch, cross_entropy, count, PassOptions(with_reference=True))

    took = np.array([[_seconds(each) for each in (apart, beside)] for _ in range(rounds + 1)])[1:]
    calls = _calls(worker, lambda: worker.forward(batch))
    worker.close()
    first, second = (statistics.median(took[:, n]) for n in range(2))
    return first, second, calls


def _seconds(action: Callable[[], Any]) -> float:
    _together()
    begun = time.perf_counter()
    action()
    _together()
    return time.perf_counter() - begun


def _together() -> None:
    import torch.distributed as dist

    dist.barrier()


def _calls(worker: MegatronWorker, action: Callable[[], Any]) -> int:
    """How often the stage's model is run in an action: its microbatches."""
    calls: list[None] = []
    hook = worker.policy.chunks.models[0].register_forward_pre_hook(lambda *_: calls.append(None))
    action()
    hook.remove()
    return len(calls)


if __name__ == "__main__":
    main()
