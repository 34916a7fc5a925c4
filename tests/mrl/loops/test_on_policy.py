"""The loop's arithmetic over a table policy: which log-probs a token's ratio is taken against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.errors import CheckpointError, WeightSyncError, WorkerLost
from mrl.loops.nan_guard import BadNumbers
from mrl.observe.metrics_log import without_volatile
from mrl.routes import Routes
from mrl.training.batch import pack
from tests.mrl.loops.table_policy import TableRun, config_of, logprobs_of

DAPO = {
    "loss": {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.03},
    "aggregation": {"mode": "token_mean"},
    "filter": {"min_reward_range": 0.0, "max_rounds": 4},
}


def test_surplus_groups_are_trained_against_the_policy_that_sampled_them(tmp_path: Path) -> None:
    """The ratio is new / engine for stale tokens and 1 for fresh ones; only stale ones are clipped."""
    run, aged, clipped = TableRun(config_of(tmp_path, DAPO, "training.optimizer.lr=3.0")), 0, 0
    run.loop.start()
    for version in range(8):
        before = run.train.table.detach().clone()
        run.loop.step()
        row, groups = run.rows()[-1], run.groups[-1]
        batch, mask = pack(groups), pack(groups).loss_mask
        versions = np.concatenate([s.policy_versions for g in groups for s in g.samples])
        current, rollout = logprobs_of(before, batch).numpy()[mask], batch.arrays["rollout_logprobs"][mask]
        old = versions < version
        ratio = np.where(old, np.exp(current - rollout), 1.0)
        up = run.train.batches[-1].arrays["advantages"][mask] > 0
        assert row["policy/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
        assert row["policy/ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
        assert row["policy/clip_frac_high"] == pytest.approx((up & (ratio > 1.03)).mean(), abs=1e-6)
        assert row["policy/clip_frac_low"] == pytest.approx((~up & (ratio < 0.98)).mean(), abs=1e-6)
        assert row["policy/stale_token_frac"] == pytest.approx(old.mean())
        assert row["policy/staleness_max"] == (version - versions).max()
        assert row["policy/rollout_logprob_diff_max"] < 1e-5, "an earlier version is no mismatch"
        assert row.get("policy/rollout_difference_max", 0.0) < 1e-5
        aged += old.any()
        clipped += row["policy/clip_frac_high"] + row["policy/clip_frac_low"] > 0
    assert aged >= 4 and clipped >= 4


@pytest.mark.parametrize("minibatches", [1, 2], ids=["log-probs of the update", "log-probs of a pass"])
def test_samples_tell_what_their_tokens_were_trained_with(tmp_path: Path, minibatches: int) -> None:
    run = TableRun(config_of(tmp_path, {**DAPO, "minibatches": minibatches}, "training.optimizer.lr=3.0"))
    run.loop.start()
    for _ in range(4):
        before = run.train.table.detach().clone()
        run.loop.step()
    batch = pack(run.groups[-1])
    ratios = np.exp(logprobs_of(before, batch).numpy() - batch.arrays["rollout_logprobs"])
    places = {name: batch.positions(np.array([place])) for place, name in enumerate(batch.sample_ids)}
    (file,) = tmp_path.rglob("samples.jsonl")
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["step"] == 4]
    with_tokens = [row for row in rows if "tokens" in row]
    assert len(with_tokens) == 4 < len(rows)
    for row in with_tokens:
        pos = places[row["sample_id"]][row["prompt_tokens"] :]
        assert row["tokens"]["text"] == [str(token) for token in batch.tokens[pos]]
        np.testing.assert_allclose(row["tokens"]["logprob"], batch.arrays["rollout_logprobs"][pos], atol=1e-4)
        np.testing.assert_allclose(row["tokens"]["ratio"], ratios[pos], atol=2e-4)
        assert "advantage" in row["tokens"] and "age" in row["tokens"]


def test_later_passes_take_the_routes_of_the_first(tmp_path: Path) -> None:
    """Each minibatch brings the routes of its own samples; the next step has new ones."""
    algorithm = {"minibatches": 2, "kl": {"location": "loss", "kind": "k3", "coefficient": 0.1}}
    run = TableRun(config_of(tmp_path, algorithm, "routing.replay=trainer"))
    run.loop.start()
    run.loop.step()
    assert run.train.called == ["forward policy", "forward reference with routes", "update", "update"]
    samples = [routes.pieces[0].start for batch in run.train.batches for routes in batch.routes or ()]
    assert samples == list(range(16))
    run.loop.step()
    assert run.train.called[4] == "forward policy"


def test_every_pass_takes_the_routes_of_the_engines(tmp_path: Path) -> None:
    """Samples without routes: no pass is made, instead of one that chooses by itself."""
    algorithm = {"minibatches": 2, "kl": {"location": "loss", "kind": "k3", "coefficient": 0.1}}
    run = TableRun(config_of(tmp_path, algorithm, "routing.replay=engine"))
    run.loop.start()
    run.loop.step()
    assert run.train.called == ["forward policy with routes", "reference beside", "update", "update"]
    assert all(batch.routes == (Routes(()),) * batch.num_samples for batch in run.train.batches)


ONE_UPDATE: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"loss": {"name": "gspo"}},
    "tis": {"correction": {"kind": "truncated", "high": 2.0}},
    "icepop": {"correction": {"kind": "icepop", "low": 0.5, "high": 5.0}},
    "kl in the loss": {"kl": {"location": "loss", "kind": "k3", "coefficient": 0.1, "unbiased": True}},
    "dapo": DAPO,
}


def stepped(folder: Path, algorithm: dict[str, Any], name: str = "run", steps: int = 4) -> TableRun:
    run = TableRun(config_of(folder, algorithm, f"run.name={name}"))
    run.loop.start()
    for _ in range(steps):
        run.loop.step()
    return run


@pytest.mark.parametrize("algorithm", ONE_UPDATE.values(), ids=ONE_UPDATE)
def test_one_update_needs_no_pass_before_it(algorithm: dict[str, Any], tmp_path: Path) -> None:
    """Weights and rows equal those with recomputed old log-probs, to rounding."""
    auto = stepped(tmp_path, algorithm, "auto")
    recomputed = stepped(tmp_path, algorithm | {"old_logprobs": "recomputed"}, "recomputed")
    assert [run.train.called.count("update") for run in (auto, recomputed)] == [4, 4]
    assert [run.train.called.count("forward policy") for run in (auto, recomputed)] == [0, 4]
    torch.testing.assert_close(auto.train.table, recomputed.train.table, atol=1e-6, rtol=0)
    for ours, theirs in zip(auto.rows(), recomputed.rows(), strict=True):
        assert without_volatile(ours) == pytest.approx(without_volatile(theirs), abs=2e-6)
    assert auto.rows()[-1]["policy/rollout_logprob_diff_max"] < 1e-5


def test_the_engines_own_need_no_pass_either(tmp_path: Path) -> None:
    run = stepped(tmp_path, {"old_logprobs": "rollout"}, steps=1)
    assert run.train.called == ["update"] and run.rows()[0]["policy/rollout_logprob_diff_max"] < 1e-5


FALLS_BACK: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 2},
    "minibatches": {"minibatches": 2},
    "kl in the reward": {"kl": {"location": "reward", "kind": "k1", "coefficient": 0.1}},
    "asked for": {"old_logprobs": "recomputed"},
}


@pytest.mark.parametrize("algorithm", FALLS_BACK.values(), ids=FALLS_BACK)
def test_the_pass_stays_where_it_is_needed(algorithm: dict[str, Any], tmp_path: Path) -> None:
    run = stepped(tmp_path, algorithm, steps=1)
    assert run.train.called[0] == "forward policy" and "old_logprobs" in run.train.batches[0].arrays
    assert run.rows()[0]["policy/rollout_logprob_diff_max"] < 1e-5


def test_while_only_the_critic_learns_the_engine_is_still_measured(tmp_path: Path) -> None:
    words = ("critic={warmup_steps: 2}",)
    run = TableRun(config_of(tmp_path, {"estimator": {"name": "gae"}}, *words))
    run.loop.start()
    for _ in range(3):
        run.loop.step()
    warm, last = run.train.called[:4], run.train.called[4:]
    assert warm == ["forward policy", "forward critic"] * 2 and last == ["forward critic", "update"]
    assert all("policy/rollout_logprob_diff_max" in row for row in run.rows())


@pytest.mark.parametrize("old_logprobs", ["auto", "recomputed"])
def test_engines_with_other_weights_end_the_run_before_a_parameter_changes(
    old_logprobs: str, tmp_path: Path
) -> None:
    run = TableRun(config_of(tmp_path, {"old_logprobs": old_logprobs}, "loop.max_rollout_mismatch=1e-3"))
    run.loop.start()
    run.loop.step()
    run.engines.damage[:, 0] = 0.1
    run.engines.sync(1)
    before = run.train.table.detach().clone()
    with pytest.raises(WeightSyncError, match=r"differ by 0\.\d+ at version 1"):
        run.loop.step()
    assert torch.equal(run.train.table, before) and run.engines.version == 1 and len(run.rows()) == 1


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({}, ["update", "reference beside"]),
        ({"minibatches": 2}, ["forward policy", "reference beside", "update", "update"]),
    ],
)
def test_the_reference_says_its_log_probs_in_the_policys_pass(
    algorithm: dict[str, Any], passes: list[str], tmp_path: Path
) -> None:
    """In the only update or in the pass for old log-probs; never in an extra pass, and once per step."""
    kl = {"location": "loss", "kind": "k3", "coefficient": 0.1}
    run = stepped(tmp_path, algorithm | {"kl": kl}, steps=2)
    assert run.train.called == passes * 2
    assert run.rows()[0]["policy/kl_reference"] < run.rows()[1]["policy/kl_reference"]


@pytest.mark.parametrize("algorithm", [{}, {"minibatches": 2}])
def test_what_the_reference_says_must_be_numbers(algorithm: dict[str, Any], tmp_path: Path) -> None:
    kl = {"location": "loss", "kind": "k3", "coefficient": 0.1}
    run = TableRun(config_of(tmp_path, algorithm | {"kl": kl}))
    run.loop.start()
    run.train.reference[3] = float("nan")
    before = run.train.table.detach().clone()
    with pytest.raises(BadNumbers, match="ref_logprobs is not finite"):
        run.loop.step()
    assert torch.equal(run.train.table, before) and not run.rows()


@pytest.mark.parametrize("old_logprobs", ["auto", "recomputed"])
def test_log_probs_that_are_no_numbers_are_named_before_a_parameter_changes(
    old_logprobs: str, tmp_path: Path
) -> None:
    run = TableRun(config_of(tmp_path, {"old_logprobs": old_logprobs}))
    run.loop.start()
    with torch.no_grad():
        run.train.table[3] = float("nan")
    before = run.train.table.detach().clone()
    with pytest.raises(BadNumbers, match="logprobs is not finite") as caught:
        run.loop.step()
    ids = {s.sample_id for g in run.groups[-1] for s in g.samples}
    assert 0 < len(caught.value.sample_ids) < len(ids)
    assert torch.equal(run.train.table.nan_to_num(), before.nan_to_num()) and not run.rows()


SAVES = ("loop.checkpoint={every_steps: 1, keep: 9}",)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = TableRun(config_of(tmp_path, DAPO, "run.name=whole"))
    whole.loop.start()
    for _ in range(6):
        whole.loop.step()
    first = TableRun(config_of(tmp_path, DAPO, "run.name=parts", *SAVES))
    first.loop.start()
    for _ in range(3):
        first.loop.step()
    second = first.resumed()
    assert second.loop.next_step == 4
    second.loop.start()
    for _ in range(3):
        second.loop.step()
    assert torch.equal(second.train.table, whole.train.table)
    assert [without_volatile(row) for row in second.rows()] == [without_volatile(row) for row in whole.rows()]


def test_a_death_in_the_sync_loses_neither_step_nor_row(tmp_path: Path) -> None:
    """The checkpoint holds the row that the death prevents; the due validation runs before the first step."""
    words = ("loop.validation.every_steps=1", "loop.steps=3")
    whole = TableRun(config_of(tmp_path, DAPO, *words, "run.name=whole"))
    assert whole.finished() == "done"
    run = TableRun(config_of(tmp_path, DAPO, *SAVES, *words))
    run.loop.start()
    run.loop.step()
    run.engines.dies = WorkerLost("engine 0 died in phase sync")
    with pytest.raises(WorkerLost, match="phase sync"):
        run.loop.step()
    assert [row["step"] for row in run.rows()] == [1] and len(run.train.saved) == 2
    again = run.resumed()
    assert again.loop.next_step == 3
    again.loop.start()
    assert list(again.loop.steps()) == [2, 3], "the row that was missing is a step's to its reader"
    rows = [without_volatile(row) for row in again.rows()]
    assert [row["val/reward"] for row in rows] == [row["val/reward"] for row in whole.rows()]
    assert [row["step"] for row in rows] == [1, 2, 3] and again.engines.version == 3


def test_a_row_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    """Nor is its validation: a run ends long after a step and resumes from there."""
    words = (*SAVES, "loop.validation.every_steps=1")
    run = TableRun(config_of(tmp_path, DAPO, *words, "loop.steps=2"))
    assert run.finished() == "done"
    again = run.resumed(config_of(tmp_path, DAPO, *words, "loop.steps=3"))
    again.loop.start()
    assert list(again.loop.steps()) == [3]
    assert [row["step"] for row in again.rows()] == [1, 2, 3]


def test_a_death_before_the_update_repeats_the_step(tmp_path: Path) -> None:
    run = TableRun(config_of(tmp_path, DAPO, *SAVES))
    run.loop.start()
    run.loop.step()
    before = run.train.table.detach().clone()
    run.train.dies = WorkerLost("trainer rank 1 died in phase update")
    with pytest.raises(WorkerLost, match="phase update"):
        run.loop.step()
    again = run.resumed()
    assert again.loop.next_step == 2 and torch.equal(again.train.table, before)


def test_a_step_whose_groups_are_all_filtered_trains_nothing_and_syncs(tmp_path: Path) -> None:
    run = TableRun(config_of(tmp_path, DAPO | {"filter": DAPO["filter"] | {"min_reward_range": 2.0}}))
    run.loop.start()
    run.loop.step()
    (row,) = run.rows()
    assert (row["rollout/groups"], row["group/short"], row["group/rounds"]) == (0, 4, 4)
    assert not any(name.startswith(("optim/", "policy/loss")) for name in row)
    assert run.train.called == [] and run.engines.version == 1


def test_a_request_to_stop_finishes_the_step_and_saves(tmp_path: Path) -> None:
    run = TableRun(config_of(tmp_path, {}, "loop.steps=5"), should_stop=lambda: "SIGINT")
    run.loop.start()
    assert run.loop.run() == "SIGINT"
    ((state, table),) = run.train.saved.values()
    assert state["next_step"] == 2 and torch.equal(table, run.train.table)
    assert TableRun(config_of(tmp_path, {}, "loop.steps=2", "run.name=other")).finished() == "done"


def test_steps_are_read_one_by_one_and_stopped_by_their_reader(tmp_path: Path) -> None:
    reasons: list[str] = []
    run = TableRun(config_of(tmp_path, {}, "loop.steps=5"), should_stop=lambda: (*reasons, None)[0])
    run.loop.start()
    read = []
    for number in run.loop.steps():
        read.append(number)
        assert [row["step"] for row in run.rows()] == read, "a step is told when its row is written"
        reasons += ["enough"] * (number == 2)
    assert (read[-2:], run.loop.ended) == ([1, 2], "enough")
    ((state, _),) = run.train.saved.values()
    assert state["next_step"] == 3


BESIDE = "loop.checkpoint={every_steps: 1, keep: 9, async_save: true}"


@pytest.mark.parametrize("writes_slowly", [False, True])
def test_a_checkpoint_beside_training_is_committed_in_the_next_step(
    writes_slowly: bool, tmp_path: Path
) -> None:
    """After its generation if the files exist by then, else before the next save. The last one at once."""
    run = TableRun(config_of(tmp_path, {}, BESIDE, "loop.steps=3"))
    run.train.writes_slowly, run.loop.on_batch = (
        writes_slowly,
        lambda groups: seen.append(len(run.train.saved)),
    )
    seen: list[int] = []
    tables = []
    run.loop.start()
    for step in range(3):
        run.loop.step()
        tables.append(run.train.table.detach().clone())
        assert len(run.train.saved) == (3 if step == 2 else step), "a step too late or too early"
    for (path, (state, table)), step in zip(run.train.saved.items(), (1, 2, 3), strict=True):
        assert path.name.endswith(f"{step}") and state["next_step"] == step + 1
        assert torch.equal(table, tables[step - 1]), "not the weights of its step"


def test_a_run_that_stops_commits_what_is_written_beside_it(tmp_path: Path) -> None:
    stops = iter([None, "SIGINT"])
    run = TableRun(config_of(tmp_path, {}, BESIDE, "loop.steps=9"), should_stop=lambda: next(stops))
    run.train.writes_slowly = True
    assert run.finished() == "SIGINT"
    assert [state["next_step"] for state, _ in run.train.saved.values()] == [2, 3]


def test_a_failed_save_beside_training_counts_at_its_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TableRun(config_of(tmp_path, {}, BESIDE, "loop.checkpoint.max_failed=2", "loop.steps=9"))
    run.loop.start()
    run.train.save_fails = CheckpointError("the disk is full")
    run.loop.step()
    assert "FAILED" not in caplog.text
    run.loop.step()
    assert "checkpoint of step 1 FAILED, training goes on: the disk is full (1 in a row" in caplog.text
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.loop.step()


def test_failed_saves_are_loud_and_end_the_run_at_their_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TableRun(config_of(tmp_path, {}, "loop.checkpoint={every_steps: 1, max_failed: 2}"))
    run.loop.start()
    run.train.save_fails = CheckpointError("the disk is full")
    run.loop.step()
    assert "checkpoint of step 1 FAILED, training goes on: the disk is full" in caplog.text
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.loop.step()
