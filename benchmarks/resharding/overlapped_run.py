"""Measure how long a stream's engine stops for weights that come over a limited link (sync.overlap).

    python -m benchmarks.resharding.overlapped_run --gbit 0.2 --out OUT [-- sync.overlap=off]

Starts `mrl train` under torchrun on two simulated machines (limited_link.py): the trainer rank on the first,
a vLLM engine on the second. Prints a line per step. Arguments after `--` are settings. Needs root, iproute2,
and a kernel with veth and sch_tbf.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.resharding.limited_link import ADDRESSES, NAMES, link
from mrl.observe.metrics_log import read
from mrl.prepare import arithmetic_rows

SETTINGS = (
    "model={max_length: 48, new: {num_layers: 8, hidden_size: 256, num_heads: 4, num_kv_heads: 2, "
    "head_dim: 64, num_experts: 16, expert_size: 512}}",
    "data.max_prompt_tokens=8",
    "reward={kind: maths, maths: {extraction: [whole_response], symbolic: false}, workers: 1}",
    "training.layout={ep: 1, dp: 1}",
    "rollout={max_response_tokens: 32, max_num_seqs: 16, kv_cache_bytes: 33554432}",
    "loop={schedule: stream, steps: 6, prompts_per_step: 16, samples_per_prompt: 8}",
    "loop.validation={before_training: false, after_training: false}",
    "loop.checkpoint={every_steps: 0, at_end: false}",
    "stream.max_staleness=2",
    "launch={engine_slots: 1, slots_per_node: 1, object_store_bytes: 83886080}",
)
NAMED = (
    "sync/transfer_seconds",
    "stream/stopped_seconds",
    "sync/steps_meanwhile",
    "sync/seconds",
    "sync/bytes",
    "policy/staleness_max",
    "time/step_seconds",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both machines and print the steps; return 1 if some are missing."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, default=0.2, help="rate of the link in Gbit/s, each way")
    parser.add_argument("--out", type=Path, required=True, help="folder for data, logs and the run")
    parser.add_argument("--seconds", type=float, default=600.0, help="deadline of the whole run in seconds")
    options = parser.parse_args(words[:end])
    folder = options.out.resolve()
    arithmetic_rows.write_arithmetic(str(folder / "data"), largest=9, num_validation=8, num_sft=8)
    paths = [f"run={{name: run, folder: {folder}}}", f"model.path={folder}/model"]
    paths.append(f"data.train={folder}/data/train.jsonl")
    settings = [*SETTINGS, *paths, *words[end + 1 :]]
    with link(options.gbit), contextlib.ExitStack() as stack:
        first, _ = [stack.enter_context(_machine(node, folder, settings)) for node in range(len(NAMES))]
        first.wait(options.seconds)
    rows = [row for row in read(folder / "run" / "metrics.jsonl") if row["step"]]
    for row in rows:
        print(row["step"], *(f"{name} {row[name]:.3f}" for name in NAMED if name in row))
    return int(len(rows) < 6)


@contextlib.contextmanager
def _machine(node: int, folder: Path, settings: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun on a machine; end its whole process group at the end."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", str(len(NAMES)), "--nproc-per-node", "1"]
    torchrun += ["--local-addr", ADDRESSES[node], "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29600", "--rdzv-conf", f"is_host={int(node == 0)}"]
    command = ["ip", "netns", "exec", NAMES[node], sys.executable, *torchrun, "-m", "mrl.launch.torchrun"]
    with (folder / f"machine-{node}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
