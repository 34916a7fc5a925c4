"""Two nodes on this machine: a tiny two-step run over both, free ports, processes with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from mrl.prepare import arithmetic_rows

ROOT = Path(__file__).resolve().parents[2]


def write_run(folder: Path, *, steps: int = 2) -> Path:
    """Write a configuration (EP2 over two slots) and its data; the run makes the model."""
    arithmetic_rows.write_arithmetic(str(folder / "data"), largest=9, num_validation=8, num_sft=8)
    path = folder / "run.yaml"
    path.write_text(
        f"""
run: {{name: run, folder: {folder}/runs}}
model:
  path: {folder}/model
  max_length: 16
  new:
    {{num_layers: 2, hidden_size: 64, num_heads: 2, num_kv_heads: 2, head_dim: 32, num_experts: 4,
     expert_size: 32}}
data: {{train: {folder}/data/train.jsonl, max_prompt_tokens: 8}}
reward: {{kind: maths, maths: {{extraction: [whole_response], symbolic: false}}, workers: 1}}
training:
  layout: {{ep: 2, dp: 2}}
rollout: {{max_response_tokens: 4, max_num_seqs: 16, kv_cache_bytes: 33554432}}
sync: {{bucket_bytes: 1048576}}
loop:
  steps: {steps}
  prompts_per_step: 2
  samples_per_prompt: 4
  validation: {{before_training: false, after_training: false}}
  checkpoint: {{every_steps: 0}}
launch: {{slots_per_node: 1, object_store_bytes: 83886080}}
"""
    )
    return path


def rows(folder: Path) -> list[dict]:
    path = folder / "runs" / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def steps_done(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder) if row["step"] > 0]


_held: list[socket.socket] = []
"""Socket name that reserves the last returned base for this process."""


def free_port_base() -> int:
    """Return a free port base for two nodes, reserved until this process requests another one."""
    while _held:
        _held.pop().close()
    for attempt in range(28):
        base = 20000 + (os.getpid() * 7 + attempt * 13) % 28 * 400
        name = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            name.bind(f"\0mrl-tests-ports-{base}")
            if all(_is_free(base + offset) for offset in (*range(10), *range(200, 210), 399)):
                _held.append(name)
                return base
        name.close()
    raise AssertionError("no free ports between 20000 and 31200")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    log: Path,
    environment: dict[str, str] | None = None,
    within: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process `within` another command, its output in `log`; kill it and its children afterwards."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*within, sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(180)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()
