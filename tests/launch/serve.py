"""Runs stock vLLM on a folder, without our code: `python serve.py FOLDER PROMPTS.json OUT.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np


def start(
    folder: Path, prompts: list[list[int]], *, log: Path, seconds: float = 240.0
) -> list[tuple[list[int], np.ndarray]]:
    """Return (tokens [T], log-probs [T - 1] of all but the first) of each prompt with its greedy response."""
    requests, answer = log.with_suffix(".prompts.json"), log.with_suffix(".json")
    requests.write_text(json.dumps(prompts))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    words = [sys.executable, "-P", __file__, str(folder), str(requests), str(answer)]
    with log.open("w") as output:
        subprocess.run(
            words, cwd=log.parent, env=environment, stdout=output, stderr=output, timeout=seconds, check=False
        )
    assert answer.exists(), log.read_text(errors="replace")[-4000:]
    return [(row["tokens"], np.array(row["logprobs"])) for row in json.loads(answer.read_text())]


def main(folder: str, prompts_file: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        max_model_len=16,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 25,
        max_num_seqs=4,
    )
    prompts = json.loads(Path(prompts_file).read_text())
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, prompt_logprobs=1)
    rows = []
    for made in engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False):
        tokens = [*made.prompt_token_ids, *made.outputs[0].token_ids]
        positions = [*made.prompt_logprobs[1:], *made.outputs[0].logprobs]
        logprobs = [position[t].logprob for position, t in zip(positions, tokens[1:], strict=True)]
        rows.append({"tokens": tokens, "logprobs": logprobs})
    Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
