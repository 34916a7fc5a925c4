"""Teachers in an algorithm: their advantages without rewards, and settings that cannot be combined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.sections.algorithm import AlgorithmSection
from tests.tiny_models import random_batch


def test_alone_replaces_the_advantages_of_rewards() -> None:
    batch, rewards = random_batch(4, seed=0), np.array([1.0, 0.0, 0.0, 0.0])
    batches = {}
    for alone in (False, True):
        section = {"distillation": {"teachers": {"default": "one"}, "teachers_only": alone}}
        batches[alone], metrics = shape_and_estimate(AlgorithmSection.model_validate(section), batch, rewards)
        assert metrics["advantage/abs_max"] > 0, "of the rewards"
    np.testing.assert_array_equal(batches[True].arrays["advantages"], 0)
    assert np.abs(batches[False].arrays["advantages"]).max() > 0
    np.testing.assert_array_equal(batches[True].loss_mask, batches[False].loss_mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filter": {}, "distillation": {"teachers_only": True}}, "which groups the teachers see"),
        ({"estimator": {"name": "gae"}, "distillation": {"teachers_only": True}}, "read the critic's values"),
        ({"distillation": {"teachers": {}}}, "at least 1 item"),
        ({"distillation": {"teacher_share": 0.3}}, "only read by divergence = jsd"),
        ({"distillation": {"divergence": "k3"}}, "reverse, forward, jsd"),
    ],
)  # fmt: skip
def test_what_cannot_work_together_is_refused(changes: dict[str, Any], message: str) -> None:
    distillation = {"teachers": {"default": "one"}} | changes.get("distillation", {})
    with pytest.raises(ValidationError, match=message):
        AlgorithmSection.model_validate(changes | {"distillation": distillation})
