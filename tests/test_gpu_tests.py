"""Tests of one GPU are collected without vLLM, Ray and the larger libraries, with torch and little else."""

import re
import subprocess
import sys

from tests.support.source_tree import ROOT

ABSENT = ["vllm", "ray", "megatron", "transformers", "safetensors", "pyarrow"]


def test_all_but_training_needs_torch_and_small_packages_alone() -> None:
    (words,) = re.findall(
        r"^gpu-smoke:\n\t\$\(BIN\)/python -m pytest (.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import pytest; "
        f"raise SystemExit(pytest.main(['--collect-only', *{words.split()!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    collected = set(re.findall(r"^tests/gpu/(test_\w+)\.py::", done.stdout, re.M))
    assert collected == {"test_kernels", "test_offload", "test_transfer"}
