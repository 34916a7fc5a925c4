"""Variables that vLLM reads, set before its import."""

import os
import sys

import pytest

from mrl.config.sections.rollout import RolloutSection
from mrl.rollout import vllm_environment
from mrl.rollout.engine_process import EngineProcess


@pytest.mark.parametrize(
    ("on_cpu", "chosen", "level"), [(True, None, "WARNING"), (False, None, "INFO"), (False, "ERROR", "ERROR")]
)
def test_an_engine_s_log_names_the_kernels_that_vllm_chose_on_gpus(
    on_cpu, chosen, level, monkeypatch
) -> None:
    """vLLM names them at INFO, and what a missing ninja turns off at WARNING."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    monkeypatch.setattr(os, "environ", environment | ({"VLLM_LOGGING_LEVEL": chosen} if chosen else {}))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm_environment.prepare(RolloutSection(), EngineProcess(), None, compiled=True, on_cpu=on_cpu)
    assert os.environ["VLLM_LOGGING_LEVEL"] == level
