"""What running ahead gains: the formula by hand, against recorded runs, and as `mrl plan` prints it."""

import pytest

from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import capacity_report
from mrl.capacity.running_ahead import running_ahead, step_seconds, work_seconds
from mrl.config.load import load
from mrl.files import CONFIGS

QWEN_30B = CONFIGS / "qwen3_30b_a3b.yaml"
TOOLS = CONFIGS / "qwen3_30b_a3b_tools.yaml"


def estimate(*words: str, files=(QWEN_30B,)) -> Estimate:
    return Estimate(load(list(files), words), load_hardware("8x80gb"))


def test_the_steps_by_hand() -> None:
    parts = {"train": 30.0, "longest": 90.0, "work": 20.0, "other": 4.0}
    assert step_seconds(**parts, max_age=0, own_slots=False) == 30 + 90 + 4
    assert step_seconds(**parts, max_age=1, own_slots=False) == 30 + 20 + 70 / 2 + 4
    assert step_seconds(**parts, max_age=1, own_slots=True) == 30 + 70 / 2 + 4
    busy = parts | {"work": 90.0}
    assert step_seconds(**busy, max_age=2, own_slots=True) == 90 + 4, "full engines are the longer half"
    assert step_seconds(**busy, max_age=2, own_slots=False) == 30 + 90 + 4, "nothing to gain on shared slots"


RECORDED = {
    "own slots, age 1": (2.000, 1.095, 48 / 312, 1, True, 1.47),
    "own slots, age 2": (2.000, 1.095, 48 / 312, 2, True, 1.72),
    "own slots, slower engines, age 1": (2.853, 1.837, 48 / 312, 1, True, 1.47),
    "own slots, slower engines, age 2": (2.853, 1.837, 48 / 312, 2, True, 1.74),
    "waiting environments, age 2": (21.1, 19.5, 0.0, 2, False, 2.54),
    "waiting environments, age 4": (21.1, 19.5, 0.0, 4, False, 3.58),
}
"""Row -> (seconds of an on_policy step, of them waiting for responses, mean response over the longest, age, own slots,
measured speed-up of the means). 128 responses of 48 tokens in the mean have a longest of 312 in the mean."""


@pytest.mark.parametrize("row", RECORDED)
def test_recorded_speed_ups_come_out_within_ten_percent(row: str) -> None:
    on_policy, longest, mean_response, max_age, own_slots, measured = RECORDED[row]
    work = longest * mean_response / (max_age + 1)  # all sequences of max_age + 1 steps fit the engine
    train = on_policy - longest
    step = step_seconds(
        train=train, longest=longest, work=work, other=0, max_age=max_age, own_slots=own_slots
    )
    assert on_policy / step == pytest.approx(measured, rel=0.1)


def test_a_plan_takes_the_seconds_of_its_step() -> None:
    shared = estimate()
    seconds, ahead = shared.seconds, running_ahead(shared)
    assert [one.max_age for one in ahead] == [1, 2]
    for one in ahead:
        work = work_seconds(shared, one.max_age)
        expected = sum(seconds.values()) - (seconds["generate"] - work) * (1 - 1 / (one.max_age + 1))
        assert one.step_seconds == pytest.approx(expected)
        assert one.speed_up == pytest.approx(sum(seconds.values()) / one.step_seconds)
    assert 1 < ahead[0].speed_up < ahead[1].speed_up


def test_engines_that_are_full_work_no_less_for_a_step() -> None:
    full = estimate("rollout.max_num_seqs=8")
    assert work_seconds(full, 1) == pytest.approx(work_seconds(full, 2))
    made, seconds = full.generation, full.seconds["generate"]
    tail = (full.work.longest_response - full.work.response_tokens) / made.decode_steps
    assert work_seconds(full, 1) == pytest.approx(seconds * (1 - tail), rel=0.01)


def test_the_table_names_the_gains() -> None:
    config, hardware = load([QWEN_30B]), load_hardware("8x80gb")
    report = capacity_report(config, hardware)
    one, two = report.tree["step"]["running_ahead"]
    assert f"{one['speed_up']:.2f} with max_age 1, {two['speed_up']:.2f} with max_age 2" in report.table()


def test_environments_are_not_estimated() -> None:
    assert running_ahead(estimate(files=(QWEN_30B, TOOLS))) == []
