"""The device that these tests run on: the CPU with small shapes, and a GPU where there is one.

`make gpu-smoke` reads no other conftest, so torch, pytest and this repository's small dependencies suffice.
"""

import importlib.util

import pytest
import torch

collect_ignore = [] if importlib.util.find_spec("megatron") else ["test_training.py"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("a worker takes the GPU that it sees")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
