"""Run what has to be known first about a GPU, in a quarter of an hour: each stage with a limit of its own.

    python -m benchmarks.gpu_day --out FOLDER

Results are written to FOLDER/results.jsonl as they come; a stage that fails or is late does not stop the
others. `--device cpu` runs the same stages with small models, and four times as long limits.

- libraries: import what a GPU's processes import; versions
- trainer: a Megatron step with Transformer Engine's layers against local ones (on CPU local ones twice):
  log-probs, gradient norm, seconds; bfloat16 moments saved and loaded give the same step
- float8, float8_plain_scales: three steps of a run whose engine is compiled and quantised, with DeepGEMM's
  scales as powers of two (vLLM's default) and not: log-probs of trainer and engine, memory, seconds
- sync: benchmarks.resharding.one_gpu
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.processes.start import child_environment, module_command

MODULE = "benchmarks.gpu_day"
STEPS = 3
WIDE = {
    **{"hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128},
    **{"num_experts": 32, "num_experts_per_token": 8, "expert_size": 768, "dtype": "bfloat16"},
}
"""Four layers of Qwen3-30B-A3B's widths, with a quarter of the experts: 0.7 billion parameters."""
SMALL = {"hidden_size": 256, "head_dim": 64, "num_layers": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One process of the day."""

    name: str
    seconds: float
    """Limit."""
    run: Callable[[str], dict[str, Any]]
    """Measures on a device, "cuda" or "cpu", in this process."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def libraries(device: str) -> dict[str, Any]:
    """Return versions and faults of the installed libraries."""
    from mrl.launch.cluster.gpu_libraries import gpu_libraries
    from mrl.launch.cluster.gpus import disagreements, find_gpus

    report = gpu_libraries()
    gpus = disagreements(find_gpus()) if device == "cuda" else []
    return {"versions": report.versions, "faults": [*report.faults, *gpus]}


def trainer(device: str) -> dict[str, Any]:
    """Return how far a step with fused layers is from one with local layers, and both speeds."""
    with tempfile.TemporaryDirectory(prefix="mrl-day-") as folder:
        model = _model(Path(folder), device)
        local = _step(model, device, spec="local", moments="float32")
        fused = ("transformer_engine", "bfloat16") if device == "cuda" else ("local", "float32")
        other = _step(model, device, spec=fused[0], moments=fused[1])
    apart = np.abs(local["logprobs"] - other["logprobs"])
    return {
        "compared": f"local with {fused[0]}",
        "logprob_difference_median": float(np.median(apart)),
        "logprob_difference_max": float(apart.max()),
        "grad_norm_ratio": other["grad_norm"] / local["grad_norm"],
        "seconds": {"local": local["seconds"], fused[0]: other["seconds"]},
        "resumed_step_is_the_same": local["resumes"] and other["resumes"],
    }


def _model(folder: Path, device: str) -> str:
    """Write a random model and the rows that its tokenizer is made of; return its folder."""
    from mrl.config.sections.model import NewModelSection
    from mrl.prepare import arithmetic_rows, new_model

    arithmetic_rows.write_arithmetic(folder / "rows")
    rows = [str(path) for path in sorted((folder / "rows").glob("*.jsonl"))]
    new = NewModelSection.model_validate(WIDE if device == "cuda" else SMALL)
    new_model.make_new_model(new, rows, folder / "model", max_length=64, seed=0)
    return str(folder / "model")


def _step(model: str, device: str, *, spec: str, moments: str) -> dict[str, Any]:
    from mrl.algorithms.objective import cross_entropy
    from mrl.config.sections.model import ModelSection
    from mrl.config.sections.training import TrainingSection
    from mrl.training.worker import MegatronWorker

    section = {"lr": 1e-3, "moments_dtype": moments}
    dtype = "bfloat16" if device == "cuda" else "float32"
    training = {"dtype": dtype, "spec": spec, "microbatch_tokens": 4096, "optimizer": section}
    with tempfile.TemporaryDirectory(prefix="mrl-day-") as folder:
        worker = MegatronWorker(
            ModelSection(path=model, max_length=64),
            TrainingSection.model_validate(training),
            rank=0,
            world_size=1,
            store=f"{folder}/store",
        )
        batch, seconds = _batch(256 if device == "cuda" else 16), []
        tokens = {"num_tokens": int(batch.loss_mask.sum())}
        before = worker.forward(batch)
        for _ in range(STEPS):
            start = time.monotonic()
            metrics = worker.update(batch, cross_entropy, tokens)
            seconds.append(time.monotonic() - start)
        worker.save_checkpoint(f"{folder}/saved", {})
        first = worker.update(batch, cross_entropy, tokens)
        worker.load_checkpoint(f"{folder}/saved")
        again = worker.update(batch, cross_entropy, tokens)
        worker.close()
    assert before is not None
    return {
        "logprobs": np.asarray(before["logprobs"], dtype=np.float64),
        "grad_norm": metrics["grad_norm"],
        "seconds": statistics.median(seconds[1:]),
        "resumes": first["grad_norm"] == again["grad_norm"],
    }


def _batch(samples: int) -> Any:
    from mrl.samples import TrainBatch

    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 65, samples)
    ends = np.cumsum(lengths)
    inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return TrainBatch(
        tokens=rng.integers(2, 14, ends[-1]),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        loss_mask=inside >= np.repeat(lengths // 2, lengths),
        group_ids=np.arange(samples),
        sample_ids=tuple(f"{i}.0" for i in range(samples)),
        arrays={},
    )


def float8(device: str) -> dict[str, Any]:
    """Return figures of each step of a run with quantised engines that sleep, sync and wake in turn."""
    from benchmarks.bench_run import measured_rows, whole_run
    from mrl.config.load import load_config
    from mrl.files import CONFIGS

    with tempfile.TemporaryDirectory(prefix="mrl-day-") as folder:
        model, rows = _model(Path(folder), device), f"{folder}/rows"
        words = [
            f"model={{path: {model}}}",
            f"data={{train: {rows}/train.jsonl, validation: {rows}/validation.jsonl}}",
            "rollout={quantization: fp8_block, dtype: bfloat16, gpu_memory_utilization: 0.4}",
            "training.layout={ep: 1, dp: 1}",
            "algorithm.correction.kind=truncated",
            f"loop={{max_rollout_mismatch: null, prompts_per_step: {64 if device == 'cuda' else 4}}}",
        ]
        config = load_config(str(CONFIGS / "quickstart.yaml"), *words)
        start = time.monotonic()
        metrics = measured_rows(config, whole_run, num_steps=STEPS)
    kept = (
        "policy/rollout_mismatch_kl",
        "policy/rollout_logprob_diff_max",
        "time/step_seconds",
        "sync/seconds",
    )
    steps = [{k: v for k, v in row.items() if k in kept or k.startswith("mem/")} for row in metrics]
    return {"seconds_with_start": time.monotonic() - start, "steps": steps}


def sync(device: str) -> dict[str, Any]:
    """Return the figures of benchmarks.resharding.one_gpu."""
    from benchmarks.resharding import one_gpu

    with tempfile.TemporaryDirectory(prefix="mrl-day-") as folder:
        scale, repeats = ("0.4", "3") if device == "cuda" else ("0.02", "1")
        words = ["--device", device, "--scale", scale, "--repeats", repeats, "--json", f"{folder}/figures"]
        if one_gpu.main(words):
            raise SystemExit(1)
        return json.loads(Path(folder, "figures").read_text())


STAGES = (
    Stage("libraries", 120, libraries),
    Stage("trainer", 180, trainer),
    Stage("float8", 240, float8),
    Stage("float8_plain_scales", 180, float8, {"VLLM_USE_DEEP_GEMM_E8M0": "0"}),
    Stage("sync", 120, sync),
)


def run_stage(stage: Stage, command: Sequence[str], log: Path) -> dict[str, Any]:
    """Run a stage's command within its limit; return its figures, or why there are none."""
    start, environment = time.monotonic(), child_environment() | stage.environment
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=stage.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"stage": stage.name, "failed": f"not done after {stage.seconds:g} s; see {log.name}"}
    result = {"stage": stage.name, "seconds": round(time.monotonic() - start, 1)}
    lines = output.decode(errors="replace").splitlines()
    if process.returncode or not lines:
        return result | {"failed": f"exit code {process.returncode}; see {log.name}"}
    return result | json.loads(lines[-1])


def run(stages: Sequence[Stage], out: Path, device: str) -> int:
    """Run the stages in turn; return the number of failed ones."""
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for stage in stages:
        stage = dataclasses.replace(stage, seconds=stage.seconds * (4 if device == "cpu" else 1))
        command = module_command(MODULE, "--stage", stage.name, "--device", device)
        result = run_stage(stage, command, out / f"{stage.name}.log")
        failed += "failed" in result
        line = json.dumps(result)
        with (out / "results.jsonl").open("a") as file:
            file.write(f"{line}\n")
        print(line, flush=True)
    print(f"{len(stages) - failed} of {len(stages)} stages are done", flush=True)
    return failed


def main() -> int:
    """Run all stages, or one in this process."""
    parser = argparse.ArgumentParser(prog=MODULE, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="gpu_day", help="folder for results and logs; gpu_day by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--stage", choices=[stage.name for stage in STAGES], help="only this, without a limit"
    )
    options = parser.parse_args()
    if options.stage:
        (stage,) = (stage for stage in STAGES if stage.name == options.stage)
        print(json.dumps(stage.run(options.device)), flush=True)
        return 0
    return min(1, run(STAGES, Path(options.out), options.device))


if __name__ == "__main__":
    sys.exit(main())
