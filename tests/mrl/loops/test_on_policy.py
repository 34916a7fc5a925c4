"""The loop's own arithmetic: which log-probs a token's ratio is taken against, over a policy of one table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.loops.batch import pack
from tests.mrl.loops.table_policy import TableRun, config_of, logprobs_of

DAPO = {
    "loss": {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.03},
    "aggregation": {"mode": "token_mean"},
    "filter": {"min_spread": 0.0, "max_rounds": 4, "when_spent": "train_on_fewer"},
}


def test_surplus_groups_are_trained_against_the_policy_that_sampled_them(tmp_path: Path) -> None:
    """Ratio new / sampler for tokens of an earlier version, 1 for today's; the clip acts on the first alone."""
    run, aged, clipped = TableRun(config_of(tmp_path, DAPO, "training.optimizer.lr=3.0")), 0, 0
    run.loop.start()
    for version in range(8):
        before = run.train.table.detach().clone()
        run.loop.step()
        row, groups = run.rows()[-1], run.groups[-1]
        batch, mask = pack(groups), pack(groups).loss_mask
        versions = np.concatenate([s.policy_versions for g in groups for s in g.samples])
        own, sampler = logprobs_of(before, batch).numpy()[mask], batch.arrays["sampler_logprobs"][mask]
        old = versions < version
        ratio = np.where(old, np.exp(own - sampler), 1.0)
        up = run.train.batches[-1].arrays["advantages"][mask] > 0
        assert row["policy/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
        assert row["policy/ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
        assert row["policy/clip_frac_high"] == pytest.approx((up & (ratio > 1.03)).mean(), abs=1e-6)
        assert row["policy/clip_frac_low"] == pytest.approx((~up & (ratio < 0.98)).mean(), abs=1e-6)
        assert row["policy/aged_token_frac"] == pytest.approx(old.mean())
        assert row["policy/age_steps"] == (version - versions).max()
        assert row["policy/sampler_logprob_diff_max"] < 1e-5, "an earlier version is no mismatch"
        assert row.get("policy/sampler_difference_max", 0.0) < 1e-5
        aged += old.any()
        clipped += row["policy/clip_frac_high"] + row["policy/clip_frac_low"] > 0
    assert aged >= 4 and clipped >= 4
