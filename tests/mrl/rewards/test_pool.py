"""The pool returns every sample once, retries and counts failures, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.errors import RewardError
from mrl.rewards.instructions.instruction_verifier import MAX_CHARS, Check
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool import worker_deadlines
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.samples import Status, VerdictKind
from tests.support.plugin_rewards import PLUGINS, plugin


def test_maths_verdicts_by_both_stages(make_pair: Any, score_all: Any) -> None:
    pairs = [make_pair(n, f"#### {n}", str(n if n % 2 else n + 1)) for n in range(500)]
    pairs += [
        make_pair(1000 + n, f"\\boxed{{{n + 2}\\sqrt{{2}}}}", f"\\sqrt{{{2 * (n + 2) ** 2}}}")
        for n in range(10)
    ]
    with RewardPool(RewardSection(kind="maths")) as pool:
        verdicts = score_all(pool, pairs)
        assert pool.num_open == 0
    assert all(verdicts[f"{n}.0"].value == float(n % 2) for n in range(500))
    assert all(verdicts[f"{1000 + n}.0"].value == 1.0 for n in range(10))
    assert all(v.verifier == "maths" and v.version for v in verdicts.values())


def test_hanging_samples_delay_neither_the_exact_path_nor_each_other_for_ever(make_pair: Any) -> None:
    """4 of 200 samples hang: exact verdicts come first, and each hang ends one worker."""
    section = RewardSection(
        kind="plugin", path=f"{PLUGINS}:dies_of", deadline_seconds=0.5, retries=0, workers=2
    )
    both = RewardSection(
        kind="maths", domains={"hanging": section.model_copy(update={"domains": {}})}, retries=0, workers=2
    )
    with RewardPool(both) as pool:
        warm = make_pair(9999, "1", "1", domain="hanging")
        pool.submit(*warm)
        pool.submit(*make_pair(9998, "#### 1", "1"))
        ready = 0
        while ready < 2:
            ready += len(pool.collect(60.0))
        for n in range(4):
            pool.submit(*make_pair(n, "hang", "1", domain="hanging"))
        for n in range(100, 296):
            pool.submit(*make_pair(n, f"#### {n}", str(n)))
        order: list[int] = []
        while len(order) < 200:
            for sample_id, verdict in pool.collect(30.0):
                order.append(int(sample_id[:-2]))
                assert (verdict.value == 1.0) == (order[-1] >= 100)
        counts = pool.counts()
    assert order[-1] < 100, "the exact path waited for a sample that hangs"
    assert counts["processes_lost"] == 4


def test_a_sample_that_kills_its_verifier_is_wrong_and_the_others_are_untouched(make_pair, score_all) -> None:
    pairs = [
        make_pair(n, "kill" if n == 3 else "leave" if n == 5 else f"it is {n}", str(n)) for n in range(12)
    ]
    with RewardPool(plugin("dies_of", retries=1)) as pool:
        verdicts = score_all(pool, pairs)
        counts = pool.counts()
    for n in range(12):
        assert verdicts[f"{n}.0"].kind is VerdictKind.SCORED
        assert verdicts[f"{n}.0"].value == float(n not in (3, 5))
    assert "dies of this sample" in verdicts["3.0"].reason
    assert counts["poisonous"] == 2
    assert counts["processes_lost"] == 4


def test_an_outage_leaves_samples_without_reward(make_pair, score_all, caplog) -> None:
    with RewardPool(plugin("raises", retries=1)) as pool:
        verdicts = score_all(pool, [make_pair(n, "x", "1") for n in range(60)])
        counts = pool.counts()
    assert {v.kind for v in verdicts.values()} == {VerdictKind.NO_REWARD}
    assert all(v.value is None and "the service is down" in v.reason for v in verdicts.values())
    assert counts["no_reward"] == 60 and counts["failures"] == 120
    assert any("a verifier is failing" in record.message for record in caplog.records)


def test_a_verifier_that_always_dies_leaves_samples_without_reward(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("dies_of", retries=1)) as pool:
        verdicts = score_all(pool, [make_pair(n, "kill", "1") for n in range(2)])
    assert {v.kind for v in verdicts.values()} == {VerdictKind.NO_REWARD}


def test_a_failure_that_passes_is_retried(make_pair: Any, score_all: Any, tmp_path: Path) -> None:
    pairs = [make_pair(n, "x", "1", metadata={"folder": str(tmp_path)}) for n in range(5)]
    with RewardPool(plugin("raises_once_per_sample")) as pool:
        verdicts = score_all(pool, pairs)
    assert [v.value for v in verdicts.values()] == [1.0] * 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gives_nan", "nan"), ("gives_infinity", "inf"), ("gives_text", "not str"),
        ("allocates", "reward.memory_mib = 2048"), ("runs_out_of_memory_in_c", "reward.memory_mib = 2048"),
    ],
)  # fmt: skip
def test_broken_rewards_are_never_values(name: str, says: str, make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin(name, retries=0)) as pool:
        (verdict,) = score_all(pool, [make_pair(1, "x", "1")]).values()
    assert verdict.kind is VerdictKind.NO_REWARD
    assert says in verdict.reason


def test_one_process_keeps_64_awaited_samples_in_flight(make_pair: Any, score_all: Any) -> None:
    """Each call returns only once 64 wait together, so fewer would never finish."""
    with RewardPool(plugin("waits_for_all", retries=0, deadline_seconds=80.0)) as pool:
        verdicts = score_all(pool, [make_pair(n, f"it is {n}", str(n)) for n in range(64)])
    assert [v.value for v in verdicts.values()] == [1.0] * 64


def test_awaited_groups_are_in_flight_together(make_pair: Any, score_all: Any) -> None:
    section = plugin("waits_group", group=True, retries=0, deadline_seconds=80.0)
    pairs = [make_pair(g, f"it is {s}", "1", sample_index=s) for g in range(64) for s in range(2)]
    with RewardPool(section, group_size=2) as pool:
        verdicts = score_all(pool, pairs)
    assert {k for k, v in verdicts.items() if v.value == 1.0} == {f"{g}.1" for g in range(64)}


def test_a_wait_that_never_ends_has_no_reward_and_costs_the_others_nothing(make_pair, score_all) -> None:
    texts = {3: "hang", 5: "time out"}
    pairs = [make_pair(n, texts.get(n, f"it is {n}"), str(n)) for n in range(40)]
    with RewardPool(plugin("waits", retries=0, deadline_seconds=2.0)) as pool:
        verdicts = score_all(pool, pairs)
        counts = pool.counts()
    assert "no verdict in 2 s" in verdicts["3.0"].reason
    assert "the service took too long" in verdicts["5.0"].reason
    assert {k for k, v in verdicts.items() if v.kind is VerdictKind.NO_REWARD} == {"3.0", "5.0"}
    assert "processes_lost" not in counts


def test_a_sample_that_kills_a_waiting_verifier_is_told_from_those_beside_it(make_pair, score_all) -> None:
    pairs = [make_pair(n, "kill" if n == 3 else f"it is {n}", str(n)) for n in range(12)]
    with RewardPool(plugin("waits", retries=1)) as pool:
        verdicts = score_all(pool, pairs)
    assert all(v.kind is VerdictKind.SCORED for v in verdicts.values())
    assert [n for n in range(12) if verdicts[f"{n}.0"].value == 0.0] == [3]
    assert "dies of this sample" in verdicts["3.0"].reason


def test_an_async_function_that_blocks_is_slow_but_not_killed(make_pair, score_all, monkeypatch) -> None:
    """15 blocking samples outlast a deadline; one that blocks for ever ends its process."""
    monkeypatch.setattr(worker_deadlines, "WAITING_GRACE_SECONDS", 0.5)
    with RewardPool(plugin("blocks", retries=0, deadline_seconds=1.0)) as pool:
        verdicts = score_all(pool, [make_pair(n, f"it is {n}", str(n)) for n in range(15)])
        assert [v.value for v in verdicts.values()] == [1.0] * 15
        assert "processes_lost" not in pool.counts()
        (verdict,) = score_all(pool, [make_pair(99, "hang", "1")]).values()
    assert "no verdict in 1 s" in verdict.reason


def test_a_verifier_that_prints_does_not_disturb_the_channel(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("prints")) as pool:
        verdicts = score_all(pool, [make_pair(n, "x", "1") for n in range(20)])
    assert [v.value for v in verdicts.values()] == [1.0] * 20


def test_group_verifier_sees_the_whole_group(make_pair: Any, score_all: Any) -> None:
    pairs = [
        make_pair(g, "it is 7" + "!" * (3 - s), "7", sample_index=s) for s in range(4) for g in range(3)
    ]  # fmt: skip
    with RewardPool(plugin("native_group", group=True), group_size=4) as pool:
        verdicts = score_all(pool, pairs)
    assert {k for k, v in verdicts.items() if v.value == 1.0} == {"0.3", "1.3", "2.3"}
    with pytest.raises(RewardError, match="group_size"):
        RewardPool(plugin("native_group", group=True))


def test_group_verifier_with_the_wrong_count_has_no_reward(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("wrong_count", group=True, retries=0), group_size=2) as pool:
        verdicts = score_all(pool, [make_pair(0, "x", "1", sample_index=s) for s in range(2)])
    assert all("3 rewards for 2 samples" in v.reason for v in verdicts.values())


def test_incomplete_groups_are_scored_after_a_flush(make_pair: Any) -> None:
    with RewardPool(plugin("native_group", group=True), group_size=4) as pool:
        pool.submit(*make_pair(0, "7", "7", sample_index=0))
        assert pool.collect(0.2) == []
        pool.flush_groups([0])
        assert [v.value for _, v in pool.collect(60.0)] == [1.0]


def test_process_rewards_arrive_per_token(make_pair: Any, score_all: Any) -> None:
    with RewardPool(plugin("native_process")) as pool:
        (verdict,) = score_all(pool, [make_pair(1, "x", "1", num_tokens=5)]).values()
    assert verdict.token_values is not None
    np.testing.assert_array_equal(verdict.token_values, [0.0, np.nan, 0.5, 0.75, 1.0])


def test_weighted_parts_make_one_reward(make_pair: Any, score_all: Any) -> None:
    section = RewardSection.model_validate(
        {
            "parts": [
                {"kind": "maths"},
                {"kind": "format", "weight": 0.5, "format": {"tags": ["think"]}},
                {"kind": "repetition", "weight": 2.0, "repetition": {"ngram": 1}},
            ]
        }
    )
    ground_truth = {"maths": "4", "format": None, "repetition": None}
    pairs = [
        make_pair(0, "<think>two and two</think> \\boxed{4}", ground_truth),
        make_pair(1, "a a a a", ground_truth),
    ]
    with RewardPool(section) as pool:
        verdicts = score_all(pool, pairs)
    assert verdicts["0.0"].parts["maths"] == 1.0
    assert verdicts["0.0"].value == pytest.approx(1.5 + 2.0 * verdicts["0.0"].parts["repetition"])
    assert verdicts["1.0"].value == pytest.approx(2.0 * -0.75)


def test_each_domain_has_its_verifier(make_pair: Any, score_all: Any) -> None:
    section = RewardSection.model_validate(
        {"kind": "maths", "domains": {"style": {"kind": "format", "format": {"tags": ["a"]}}}}
    )
    pairs = [make_pair(0, "#### 3", "3"), make_pair(1, "<a>x</a>", None, domain="style")]
    with RewardPool(section) as pool:
        verdicts = score_all(pool, pairs)
        assert [verdicts[f"{n}.0"].value for n in range(2)] == [1.0, 1.0]
    only = RewardSection.model_validate({"domains": {"style": {"kind": "format"}}})
    with RewardPool(only) as pool, pytest.raises(RewardError, match="'other' has no verifier"):
        pool.submit(*make_pair(0, "x", None, domain="other"))


def test_no_response_has_no_reward_and_twice_is_an_error(make_pair: Any) -> None:
    with RewardPool(plugin("dies_of", deadline_seconds=30)) as pool:
        pool.submit(*make_pair(0, "", "1", status=Status.FAILED))
        ((sample_id, verdict),) = pool.collect(10.0)
        assert (sample_id, verdict.kind) == ("0.0", VerdictKind.NO_REWARD)
        pool.submit(*make_pair(1, "hang", "1"))
        with pytest.raises(RewardError, match=r"submitted twice: 1\.0"):
            pool.submit(*make_pair(1, "hang", "1"))
    with pytest.raises(RewardError, match="closed"):
        pool.collect(0.0)


def test_a_truncated_response_is_not_read_if_so_set(make_pair: Any, score_all: Any) -> None:
    """Elsewhere the last number of half an answer counts."""
    lax = {"kind": "maths", "maths": {"extraction": ["last_number"]}}
    strict = lax | {"reject_truncated": True, "min_reward": -1.0}
    section = RewardSection.model_validate(lax | {"domains": {"strict": strict}})
    ends = [
        (domain, status) for domain in ("lax", "strict") for status in (Status.FINISHED, Status.TRUNCATED)
    ]
    pairs = [
        make_pair(n, "7 of the 15 are 7", "7", domain=d, status=status) for n, (d, status) in enumerate(ends)
    ]
    with RewardPool(section) as pool:
        verdicts = score_all(pool, pairs)
    assert [verdicts[f"{n}.0"].value for n in range(4)] == [1.0, 1.0, 1.0, -1.0]
    assert verdicts["3.0"].kind is VerdictKind.REJECTED
    assert verdicts["3.0"].reason == "the response reached its token limit"


def test_what_a_verifier_rejects_gets_the_lowest_reward(make_pair: Any, score_all: Any) -> None:
    section = RewardSection(kind="instructions", min_reward=-1.0)
    checks = (Check("all_upper_case", {}),)
    with RewardPool(section) as pool:
        verdicts = score_all(pool, [make_pair(0, "x" * (MAX_CHARS + 1), checks), make_pair(1, "x", checks)])
    assert [(v.kind, v.value) for v in (verdicts["0.0"], verdicts["1.0"])] == [
        (VerdictKind.REJECTED, -1.0),
        (VerdictKind.SCORED, 0.0),
    ]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"kind": "plugin", "path": "a:b", "group": True}, "group = true"),
        ({"kind": "environment"}, "kind = environment"),
    ],
)
def test_where_a_truncated_response_cannot_be_rejected(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"reject_truncated .*{fault}"):
        RewardSection.model_validate(settings | {"reject_truncated": True})


def test_samples_handed_in_twice_are_refused_before_any_is_handed_in(make_pair: Any) -> None:
    """In one call, during scoring, and before the verdict is collected."""
    one, two = (make_pair(n, "", "1", status=Status.FAILED) for n in (1, 2))
    with RewardPool(plugin("native")) as pool:
        with pytest.raises(RewardError, match=r"twice: 1\.0; no sample of this"):
            pool.submit_all([two, one, one])
        assert (pool.num_open, pool.collect(0.0)) == (0, [])
        pool.submit(*one)
        assert pool.num_open == 0, "its verdict is there, and waits"
        with pytest.raises(RewardError, match=r"twice: 1\.0"):
            pool.submit_all([two, one])
        assert [sample_id for sample_id, _ in pool.collect(10.0)] == ["1.0"]
        pool.submit_all([two, one])
        assert sorted(sample_id for sample_id, _ in pool.collect(10.0)) == ["1.0", "2.0"]
    only = RewardSection.model_validate({"domains": {"style": {"kind": "format"}}})
    with RewardPool(only) as pool:
        with pytest.raises(RewardError, match="'other' has no verifier"):
            pool.submit_all(
                [make_pair(0, "x", None, domain="style"), make_pair(1, "x", None, domain="other")]
            )
        assert pool.num_open == 0


def test_a_plugin_edited_during_a_run_does_not_change_the_run(make_pair, score_all, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(request): return 1.0\n")
    section = RewardSection(kind="plugin", path=f"{file}:score", tasks_per_worker=1, workers=1, retries=0)
    with RewardPool(section) as pool:
        assert score_all(pool, [make_pair(0, "x", "1")])["0.0"].value == 1.0
        file.write_text("def score(request): return 2.0\n")
        verdict = score_all(pool, [make_pair(1, "x", "1")])["1.0"]
    assert verdict.kind is VerdictKind.NO_REWARD
    assert "source changed during the run" in verdict.reason


def hanging(n: int) -> str:
    """Return an answer that takes seconds to compare: 80 sines to twelve thousand digits."""
    sines = "\\sin" * 80
    return f"\\boxed{{{sines} {n + 2}+10^{{-2900}}}}"


def test_symbolic_samples_that_hang_are_wrong_and_cost_their_deadline(make_pair: Any, score_all: Any) -> None:
    pairs = [make_pair(n, hanging(n), "\\sin 1") for n in range(3)]
    pairs += [make_pair(10 + n, f"\\boxed{{1+x+{n}}}", f"x+{n + 1}") for n in range(5)]
    with RewardPool(RewardSection(kind="maths", deadline_seconds=0.5, workers=1)) as pool:
        verdicts = score_all(pool, pairs)
        counts = pool.counts()
    assert [verdicts[f"{n}.0"].value for n in range(3)] == [0.0] * 3
    assert all("time limit of 0.5 s" in verdicts[f"{n}.0"].reason for n in range(3))
    assert [verdicts[f"{10 + n}.0"].value for n in range(5)] == [1.0] * 5
    assert counts["limit"] == 3 and "processes_lost" not in counts, "the reward worker itself was never lost"
