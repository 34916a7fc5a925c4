"""Measure a real `mrl train` of a workload by its metrics; trainer ranks and as many engines take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.against_trl.workloads import THREADS, Workload, text_of, write_model, write_tokenizer
from mrl.observe import metrics_log

WARM_UP = 1
REWARD = """from benchmarks.against_trl.workloads import reward


def shares(prompts, completions, completion_ids, **columns):
    return [reward(ids) for ids in completion_ids]
"""


def settings(
    work: Workload, folder: Path, *, steps: int, microbatch_tokens: int, processes: int
) -> dict[str, Any]:
    """Return the configuration of a run in `folder` whose `processes` trainer ranks share THREADS."""
    threads = THREADS // processes
    return {
        "run": {"name": "ours", "folder": f"{folder}/runs"},
        "model": {"path": f"{folder}/model", "max_length": work.max_length},
        "data": {
            "train": f"{folder}/train.jsonl",
            "max_prompt_tokens": work.prompt_length,
            "shuffle": False,
            "chat_template": False,
            "dedupe": False,
        },
        "reward": {"kind": "plugin", "path": f"{folder}/reward.py:shares", "style": "trl", "workers": 1},
        "training": {
            "dtype": "float32",
            "microbatch_tokens": microbatch_tokens,
            "layout": {"dp": processes},
            "num_threads": threads,
            "optimizer": {"lr": work.rate, "schedule": "constant", "weight_decay": 0.0, "warmup_steps": 0},
        },
        "rollout": {
            "dtype": "float32",
            "max_response_tokens": work.response_length,
            "num_threads": threads,
            "kv_cache_bytes": 1 << 29,
        },
        "loop": {
            "steps": steps,
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "validation": {"every_steps": 0, "before_training": False, "after_training": False},
            "checkpoint": {"every_steps": 0, "at_end": False},
        },
    }


def measure(
    work: Workload, folder: Path, *, steps: int, microbatch_tokens: int, processes: int, words: list[str]
) -> dict[str, Any]:
    """Return seconds by phase of each step after the warm-up; raise CalledProcessError or TimeoutExpired."""
    folder.mkdir(parents=True)
    write_model(folder / "model", work)
    write_tokenizer(folder / "model", work)
    (folder / "reward.py").write_text(REWARD)
    count = WARM_UP + steps
    rows = [{"prompt": text_of(prompt), "answer": "0"} for prompt in work.drawn(work.prompts * count)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(work, folder, steps=count, microbatch_tokens=microbatch_tokens, processes=processes)
    (folder / "ours.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "mrl.cli", "train", str(folder / "ours.yaml"), *words]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=3600,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()},
        )
    read = [
        row for row in metrics_log.read(folder / "runs/ours/metrics.jsonl") if "time/step_seconds" in row
    ][WARM_UP:]
    names = sorted(
        {name for row in read for name in row if name.startswith("time/") and name.endswith("_seconds")}
    )
    phases = {
        name.removeprefix("time/").removesuffix("_seconds"): [row.get(name, 0.0) for row in read]
        for name in names
    }
    return phases | {"response_tokens": [row["rollout/response_tokens_mean"] for row in read]}
