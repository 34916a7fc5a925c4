"""The GPU smoke script: the same checks over shared memory here, and on a GPU where there is one; without vLLM and Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(['vllm', 'ray'])); "
"""Any import of these is an ImportError."""


def smoke(*words: str, without: str = WITHOUT) -> str:
    code = (
        f"{without} from mrl.launch.gpu_smoke.__main__ import main; raise SystemExit(main({list(words)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.integration
def test_all_checks_pass_over_shared_memory() -> None:
    output = smoke("--device", "cpu", "--megabytes", "64")
    assert len(re.findall("^ok  ", output, re.M)) == 28, output
    assert "all checks passed on cpu" in output


def test_stages_before_training_need_torch_and_small_packages_alone() -> None:
    without = WITHOUT.replace("'ray'", "'ray', 'megatron', 'transformers', 'safetensors', 'pyarrow'")
    output = smoke(
        "--device",
        "cpu",
        "--megabytes",
        "8",
        "--only",
        "kernels",
        "copies",
        "offload",
        "transfer",
        without=without,
    )
    assert len(re.findall("^ok  ", output, re.M)) == 17, output


def test_a_wrong_kernel_fails_by_name() -> None:
    broken = "import mrl.models.kernels.experts as e; real = e.grouped_swiglu; "
    broken += "e.grouped_swiglu = lambda h, a, b, n, p: real(h, a, b, n.flip(0), p); "
    code = f"{broken} from mrl.launch.gpu_smoke.__main__ import main; "
    code += "raise SystemExit(main(['--device', 'cpu', '--only', 'kernels']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("^FAIL  experts, 5 draws", done.stdout, re.M), done.stdout


@pytest.mark.gpu
def test_all_checks_pass_on_a_gpu() -> None:
    assert "all checks passed on" in smoke()
