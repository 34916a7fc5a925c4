"""The entropy bonus's weight, step by step, and through a checkpoint."""

import json

import pytest

from mrl.algorithms import entropy_coefficient
from mrl.algorithms.entropy_coefficient import EntropyCoefficient
from mrl.config.sections.algorithm import EntropySection


def test_without_a_target_it_stays() -> None:
    fixed = EntropyCoefficient.of(EntropySection(coefficient=0.01))
    fixed.update(0.2)
    assert fixed.value == 0.01


def test_a_target(golden, monkeypatch) -> None:
    case = golden("D12")
    p = case.params
    assert p["max"] == entropy_coefficient.LARGEST
    monkeypatch.setattr(entropy_coefficient, "STEP", p["delta"])
    moving = EntropyCoefficient(raw=p["init"], target=p["target"])
    path = []
    for measured in case.inputs["window_entropy"]:
        applied = moving.value
        moving.update(measured)
        path.append([applied, moving.raw])
    case.check(case.tensor(path), case.expected["[applied_now, coef_for_next]"])


@pytest.mark.parametrize("target", [None, 0.5])
def test_restored_it_continues_as_if_never_stopped(target: float | None) -> None:
    section = EntropySection(coefficient=0.1, target=target)
    straight, first, second = (EntropyCoefficient.of(section) for _ in range(3))
    measurements = [0.4, 0.6, 0.3, 0.2, 0.9, 0.1]
    for measured in measurements:
        straight.update(measured)
    for measured in measurements[:2]:
        first.update(measured)
    second.restore(json.loads(json.dumps(first.state())))
    for measured in measurements[2:]:
        second.update(measured)
    assert second == straight
