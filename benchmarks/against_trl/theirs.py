"""Measure TRL's GRPOTrainer on a workload on CPU, in an environment with TRL (`pip install trl`).

python benchmarks/against_trl/theirs.py W2 --steps 4 --out trl.json
With two ranks: OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 FILE ...

A step lasts from the end of one optimizer step to the end of the next, so nothing is left out. Transformers
generates: TRL's only way to generate on CPU without a second copy of the weights.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import THREADS, WORKLOADS, Workload, reward, tell, text_of, write_model, write_tokenizer

WARM_UP = 1
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
THREADS_OF_ONE = os.environ.setdefault("OMP_NUM_THREADS", str(THREADS // PROCESSES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatch", type=int, help="samples per pass, over all processes; default: all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    work, steps = WORKLOADS[options.workload], WARM_UP + options.steps
    ends: list[float] = []
    generating: list[float] = []
    trainer = _trainer(work, steps, options.microbatch or work.prompts * work.samples, ends, generating)
    trainer.train()
    if not trainer.is_world_process_zero():
        return
    spent = [after - before for before, after in itertools.pairwise(ends)]
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "loss" in row]
    tell(
        {"step": spent[WARM_UP:], "generate": generating[WARM_UP:], "response_tokens": lengths[WARM_UP:]},
        options.out,
    )


def _trainer(work: Workload, steps: int, size: int, ends: list[float], generating: list[float]) -> Any:
    """Build TRL's trainer (`size` samples per pass), which appends to `ends` (times) and `generating` (s)."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *values: Any, **names: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate_single_turn(*values, **names)
            generating.append(time.perf_counter() - start)
            return result

    torch.set_num_threads(int(THREADS_OF_ONE))
    folder = tempfile.mkdtemp(prefix="against-trl-")
    write_model(Path(folder), work)
    write_tokenizer(Path(folder), work)
    rows = [{"prompt": text_of(prompt)} for prompt in work.drawn(work.prompts * steps)]
    return Timed(
        model=folder,
        reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
        args=_settings(work, steps, size),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    )


def _settings(work: Workload, steps: int, size: int) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="against-trl-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size // PROCESSES,
        gradient_accumulation_steps=work.prompts * work.samples // size,
        num_generations=work.samples,
        max_completion_length=work.response_length,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        router_aux_loss_coef=0.0,
        learning_rate=work.rate,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=steps,
        shuffle_dataset=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={
            "dtype": "float32",
            "attn_implementation": "sdpa",
            "experts_implementation": "eager",
        },
    )


if __name__ == "__main__":
    main()
