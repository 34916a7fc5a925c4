"""Which of the driver's variables reach the workers of a Ray that others started."""

import os

import pytest

from mrl.config.load import load
from mrl.launch.commands.start_run import worker_environment

CONFIG = ["run.name=r", "model.path=/m", "model.max_length=600", "data.train=/d", "reward.kind=maths"]


def test_what_the_driver_was_given_for_the_network_and_kernels_arrives_and_secrets_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {
        "NCCL_IB_HCA": "mlx5",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "GLOO_SOCKET_IFNAME": "ib0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "VLLM_USE_DEEP_GEMM": "0",
        "NVTE_FUSED_ATTN": "0",
        "TORCHINDUCTOR_CACHE_DIR": "/scratch/compiled",
        "CUDA_HOME": "/opt/cuda",
    }
    kept = {
        "VLLM_API_KEY": "s",
        "NCCL_AUTH_TOKEN": "s",
        "VLLM_SECRET_OF_MINE": "s",
        "HF_TOKEN": "s",
        "RAY_AUTH_TOKEN": "s",
        "WANDB_API_KEY": "s",
        "VLLM_HOST_IP": "10.0.0.1",
        "LD_LIBRARY_PATH": "/mine",
    }
    for name, value in (given | kept).items():
        monkeypatch.setenv(name, value)
    environment = worker_environment(load([], CONFIG))
    assert environment.items() >= given.items()
    assert not environment.keys() & kept.keys()
    assert environment["OMP_NUM_THREADS"] == "1" and len(os.environ) > len(environment)
