"""The stream schedule over a table: order, staleness, pauses, checkpoints; on-policy at staleness 0."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.errors import RolloutError
from mrl.observe.metrics_log import without_volatile
from mrl.samples import Prompt, Status, Verdict, VerdictKind
from mrl.trajectories.group_messages import decode_group
from tests.mrl.loops.table_policy import LONGEST, TableRun, config_of
from tests.support.runs import until

SAVE_AT_FIVE = ("loop.checkpoint={every_steps: 5, keep: 9}",)
FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
STREAM = "loop.schedule=stream"


def finished(
    folder: Path,
    *words: str,
    algorithm: dict[str, Any] | None = None,
    per_step: int = LONGEST,
    name: str = "run",
) -> TableRun:
    """Run twelve steps; the engines generate so many tokens of each request per step."""
    run = TableRun(config_of(folder, algorithm or {}, f"run.name={name}", "loop.steps=12", *words))
    run.engines.tokens_per_step, run.engines.at_once = per_step, 10
    run.engines.step_seconds, run.train.update_seconds = 0.001, 0.01
    assert run.finished() == "done"
    return run


GAE = {"estimator": {"name": "gae"}, "minibatches": 2}
ON_POLICY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "grpo": ({}, ()),
    "ppo": (GAE, ("critic={warmup_steps: 2}",)),
    "kl": ({"kl": {"location": "reward", "kind": "k1", "coefficient": 0.1}}, ()),
}


@pytest.mark.parametrize(("algorithm", "words"), ON_POLICY.values(), ids=ON_POLICY)
def test_without_age_it_is_on_policy_to_the_bit(
    algorithm: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    """Weights and every metric are equal, though responses finish at different engine steps."""
    plain = finished(tmp_path, *words, algorithm=algorithm, name="plain")
    stream = finished(
        tmp_path, STREAM, "stream.max_staleness=0", *words, algorithm=algorithm, name="stream", per_step=1
    )
    assert torch.equal(plain.train.table, stream.train.table)
    for ours, theirs in zip(stream.rows(), plain.rows(), strict=True):
        expected = without_volatile(theirs)
        assert expected.pop("group/rounds") == 1, "a stream has no rounds"
        assert expected == {n: v for n, v in without_volatile(ours).items() if n in expected}
        assert ours["policy/staleness_max"] == 0 and ours["stream/interrupted"] == 0


def test_with_the_filter_the_same_groups_are_kept_where_verdicts_agree(tmp_path: Path) -> None:
    """The reward wants an even first token, which the first version draws, so the first step is the same."""
    plain = finished(tmp_path, algorithm=FILTER, name="plain")
    stream = finished(tmp_path, STREAM, "stream.max_staleness=0", algorithm=FILTER, name="stream", per_step=1)
    first = [[group.prompt.index for group in run.groups[0]] for run in (plain, stream)]
    assert first[0] == first[1]
    assert all(row["policy/staleness_max"] == 0 for row in stream.rows())
    indices = [group.prompt.index for groups in stream.groups for group in groups]
    assert indices == sorted(set(indices)), "in order, each once"


@pytest.mark.parametrize(
    ("max_staleness", "sync_every", "own_slots"),
    [(1, 1, False), (2, 1, True), (3, 2, False), (1, 3, True), (0, 2, True)],
)
@pytest.mark.parametrize("algorithm", [{}, FILTER], ids=["all", "filter"])
def test_ages_stay_in_their_bound_and_order_is_that_of_prompts(
    max_staleness: int, sync_every: int, own_slots: bool, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    words = [f"stream={{max_staleness: {max_staleness}, sync_every: {sync_every}}}"]
    words += ["launch.engine_slots=1", "rollout.tp=1"] if own_slots else []
    run = finished(tmp_path, STREAM, *words, algorithm=algorithm, per_step=1)
    bound, seen = max_staleness + sync_every - 1, 0
    for version, groups in enumerate(run.groups):
        for sample in (s for g in groups for s in g.samples):
            ages = version - sample.policy_versions
            assert ages.min() >= 0 and ages.max() <= bound
            assert (np.diff(sample.policy_versions) >= 0).all() and len(sample.policy_versions) <= LONGEST
            versions = [s.version for s in sample.segments]
            assert [s.attempt for s in sample.segments] == sorted({s.attempt for s in sample.segments})
            assert len(versions) == len(set(zip(versions, [s.attempt for s in sample.segments], strict=True)))
            seen = max(seen, int(ages.max()), len(versions) - 1)
    assert seen >= 1, "nothing was ever behind: the run shows nothing"
    indices = [group.prompt.index for groups in run.groups for group in groups]
    assert indices == sorted(set(indices))
    rows = run.rows()
    assert [row["policy/staleness_max"] for row in rows] == [
        float(max((v - s.policy_versions).max() for g in groups for s in g.samples)) if groups else 0.0
        for v, groups in enumerate(run.groups)
    ]
    measured = [row[name] for row in rows if (name := "policy/rollout_logprob_diff_max") in row]
    assert 0 < len(measured) <= len(rows) and max(measured) < 1e-5


def test_what_is_parked_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    """Responses of several versions are trained; their first segments were interrupted."""
    run = finished(tmp_path, STREAM, "stream.max_staleness=3", per_step=1)
    samples = [s for groups in run.groups for g in groups for s in g.samples]
    assert sum(len(s.segments) > 1 for s in samples) > 5
    assert sum(row["stream/interrupted"] for row in run.rows()) > 20
    ids = [s.sample_id for s in samples]
    assert len(ids) == len(set(ids)) == 12 * 16


def test_steps_follow_each_other_without_a_sync_while_their_groups_are_there(tmp_path: Path) -> None:
    """Engines sleep once for three steps; a checkpoint brings the sync forward."""
    run = TableRun(
        config_of(
            tmp_path, {}, STREAM, "stream={max_staleness: 1, sync_every: 3}", "loop.steps=11", *SAVE_AT_FIVE
        )
    )
    assert run.finished() == "done"
    synced = run.engines.synced
    assert synced[:2] == [0, 3] and {5, 10, 11} <= set(synced) and len(synced) < 11
    assert max(row["policy/staleness_max"] for row in run.rows()) <= 3


PROMPT = Prompt(0, np.zeros(1, np.int32), "", None)
"""Stands for the prompts that a group's bytes do not have."""
SAVES = ("loop.checkpoint={every_steps: 1, keep: 99}", "stream.max_staleness=2", STREAM)


def after_four_steps(folder: Path, setting: str) -> tuple[TableRun, dict[str, Any]]:
    run = TableRun(config_of(folder, FILTER, "loop.steps=12", setting, *SAVES))
    run.engines.tokens_per_step, run.engines.at_once = 2, 20
    run.loop.start()
    for _ in range(4):
        run.loop.step()
    return run, max(run.train.saved.items())[1][0]


def test_a_resumed_run_trains_each_prompt_once(tmp_path: Path) -> None:
    """Ready groups and groups in flight come from the checkpoint."""
    first, state = after_four_steps(tmp_path, "stream.sync_every=1")
    assert state["supply"]["kept"] or len(state["supply"]["ledger"]["entries"]) > 4, "nothing was on its way"
    second = first.resumed()
    assert second.rollouts.buffer.store.group_ids == list(range(len(state["supply"]["kept"]))) != []
    second.engines.tokens_per_step = 1
    assert second.loop.next_step == 5
    second.loop.start()
    assert second.loop.run() == "done"
    indices = [g.prompt.index for groups in first.groups + second.groups for g in groups]
    assert indices == sorted(set(indices))
    versions = [v - s.policy_versions for v, gs in enumerate(second.groups, 4) for g in gs for s in g.samples]
    assert max(age.max() for age in versions) <= 2


@pytest.mark.parametrize("words", [(), ("launch.engine_slots=1", "rollout.tp=1")], ids=["shared", "own"])
@pytest.mark.parametrize("algorithm", [{}, FILTER], ids=["all", "filter"])
def test_no_token_is_drawn_twice_by_a_resumed_run(
    words: tuple[str, ...], algorithm: dict[str, Any], tmp_path: Path
) -> None:
    """After any last step, responses continue with their tokens, segments and versions."""
    words, interrupted = (*SAVES, *words), 0
    for steps in (1, 4, 8):
        run = TableRun(config_of(tmp_path, algorithm, f"run.name=of-{steps}", "loop.steps=12", *words))
        run.engines.tokens_per_step, run.engines.at_once, run.engines.step_seconds = 1, 4, 0.01
        run.loop.start()
        for _ in range(steps):
            run.loop.step()
        (state, _) = run.train.saved[max(run.train.saved)]
        begun = [
            decode_group(data, lambda index: replace(PROMPT, index=index))
            for data in state["supply"]["making"]
        ]
        before = {sample.sample_id: sample for group in begun for sample in group.samples}
        again = run.resumed()
        again.loop.start()
        assert again.loop.run() == "done"
        for sample in again.bounded_samples():
            if (old := before.get(sample.sample_id)) is not None:
                count = len(old.response_tokens)
                assert sample.response_tokens[:count].tolist() == old.response_tokens.tolist()
                assert sample.policy_versions[:count].tolist() == old.policy_versions.tolist()
                assert sample.segments[: len(old.segments)] == old.segments
                interrupted += old.status is Status.INTERRUPTED and count > 0
        trained = [g.prompt.index for groups in run.groups + again.groups for g in groups]
        assert trained == sorted(set(trained))
    assert interrupted, "nothing was interrupted"


def test_groups_with_routes_are_asked_anew_by_a_resumed_run(tmp_path: Path) -> None:
    """Their routes were lost with the processes; no prompt is lost or trained twice."""
    first, state = after_four_steps(tmp_path, "routing.replay=engine")
    assert state["supply"]["kept"], "no group waited for its step"
    second = first.resumed()
    assert second.rollouts.buffer.store.group_ids == []
    second.loop.start()
    assert second.loop.run() == "done"
    indices = [g.prompt.index for groups in first.groups + second.groups for g in groups]
    assert indices == sorted(set(indices)) and len(second.groups) == 8
    resumed_at = len(first.groups)
    assert all(
        (s.policy_versions >= resumed_at).all() for groups in second.groups for g in groups for s in g.samples
    ), "a token of the attempt before was trained"


def test_a_run_that_stops_pauses_and_saves(tmp_path: Path) -> None:
    run = TableRun(config_of(tmp_path, {}, STREAM, "stream.max_staleness=2"), should_stop=lambda: "SIGINT")
    run.engines.tokens_per_step = 1
    assert run.finished() == "SIGINT"
    assert run.engines.paused and [s["next_step"] for s, _ in run.train.saved.values()] == [2]


def test_a_deadline_names_the_oldest_group(tmp_path: Path) -> None:
    words = ("stream.max_staleness=1", "loop.phase_deadline_seconds=0.1")
    run = TableRun(config_of(tmp_path, {}, STREAM, *words))
    run.engines.stops_after = 0
    run.loop.start()
    with pytest.raises(
        RolloutError,
        match=r"oldest of 8 groups in flight is 0, making: 4 responses missing "
        r"\(first: 0.0 on the table; 0.1 on the table; .*\), 4 verdicts",
    ):
        run.loop.step()


def test_who_is_waited_for_is_told_of_the_oldest_group_that_is_not_ready(tmp_path: Path) -> None:
    """The oldest group is ready, the next lacks verdicts, then engines stall, then the trainer is late."""
    run = TableRun(config_of(tmp_path, {}, STREAM, "stream.max_staleness=1"))
    run.rewards.keeps_back = lambda name: not name.startswith("0.")  # type: ignore[method-assign]
    run.engines.stops_after = 0
    run.loop.start()
    run.rollouts.resume()
    buffer = run.rollouts.buffer
    until(lambda: buffer._held["engines"] > 0)
    run.engines.stops_after = None
    run.rollouts.ask(run.engines._work)
    until(lambda: buffer._held["verdicts"] > 0)
    pattern = (
        r"the oldest of 8 groups in flight is 0, kept, the oldest unfinished one is 1, making: "
        r"0 responses missing, 4 verdicts missing"
    )
    assert re.search(pattern, run.rollouts.waiting_for()), run.rollouts.waiting_for()
    for index in range(1, 8):
        for number in range(4):
            run.rewards._deliver(f"{index}.{number}", Verdict(VerdictKind.SCORED, float(number % 2)))
    until(lambda: buffer._held["slots"] > 0)
    batch, later = run.rollouts.take(0, 10.0), run.rollouts.take(1, 10.0)
    assert batch is not None and later is not None
    shares = {name: batch.metrics[f"stream/held_by/{name}"] for name in ("engines", "verdicts", "slots")}
    assert sum(shares.values()) == pytest.approx(1.0) and all(share > 0 for share in shares.values())
    assert not any(later.metrics[f"stream/held_by/{name}"] for name in shares), "counted twice"
