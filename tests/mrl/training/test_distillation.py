"""Teachers on the policy's own ranks: they say what their folder's model says, in the policy's memory, and leave no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mrl.training import distillations, scenarios
from tests.mrl.training.layouts import OneRank
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_logprobs, write_model

pytestmark = pytest.mark.integration


def test_teachers_say_what_their_folders_say(one_rank_of: OneRank, tmp_path: Path) -> None:
    folder, _ = one_rank_of.of("qwen3_moe")
    teachers = [write_model(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in (7, 8)]
    layout = {"tp": 1, "ep": 2, "dp": 2}
    arguments = str(folder), layout, [str(path) for path in teachers]
    results = run_ranks(distillations.teachers_beside_a_policy, 2, *arguments)
    for result in results:
        shard = random_batch(10, seed=1).select(result["mine"])
        for path, said in zip(teachers, result["said"], strict=True):
            expected, _ = reference_logprobs(path, shard, temperature=scenarios.TEMPERATURE)
            np.testing.assert_allclose(said["logprobs"], expected, atol=1e-5)
        assert result["same"]
        assert "no teacher 'nobody'" in result["refused"] and "add_teacher" in result["refused"]
