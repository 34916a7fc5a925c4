"""KL and entropy controllers, step by step, and through a checkpoint."""

import json

import pytest

from mrl.algorithms import controllers
from mrl.algorithms.controllers import AlgorithmState, EntropyTarget, entropy_controller, kl_controller
from mrl.config.sections.algorithm import AlgorithmSection, EntropySection, KlSection


def section(**constants) -> KlSection:
    return KlSection(location="reward", kind="k1", coefficient=0.2, **constants)


def test_adaptive_follows_ziegler() -> None:
    """Errors +0.2 (limited), +0.1, 0, -0.1, -0.2 (limited) of 256 samples, horizon 10000."""
    controller = kl_controller(section(target=6.0))
    path = []
    for measured in (60.0, 6.6, 6.0, 5.4, 0.1):
        controller.update(measured, num_samples=256)
        path.append(controller.coefficient)
    assert path == pytest.approx([0.201024, 0.20153862, 0.20153862, 0.20102268, 0.19999345], abs=5e-9)


def test_fixed_stays() -> None:
    controller = kl_controller(section())
    controller.update(100.0, num_samples=100)
    assert controller.coefficient == 0.2
    assert entropy_controller(EntropySection(coefficient=0.01)).coefficient == 0.01


def test_entropy_target(golden, monkeypatch) -> None:
    case = golden("D12")
    p = case.params
    assert p["max"] == controllers.MAX_ENTROPY_COEFFICIENT
    monkeypatch.setattr(controllers, "ENTROPY_STEP", p["delta"])
    controller = EntropyTarget(raw=p["init"], target=p["target"])
    path = []
    for measured in case.inputs["window_entropy"]:
        applied = controller.coefficient
        controller.update(measured, num_samples=1)
        path.append([applied, controller.raw])
    case.check(case.tensor(path), case.expected["[applied_now, coef_for_next]"])


@pytest.mark.parametrize("constants", [{}, {"target": 0.1, "horizon": 100}])
def test_a_restored_controller_continues_as_if_never_stopped(constants) -> None:
    config = AlgorithmSection(
        kl={"location": "loss", "coefficient": 0.1, **constants},
        entropy={"coefficient": 0.1, "target": 0.5},
    )
    straight, first = AlgorithmState.of(config), AlgorithmState.of(config)
    measurements = [(0.3, 0.4), (0.4, 0.6), (0.5, 0.3), (0.05, 0.2), (0.01, 0.9), (0.3, 0.1)]

    def learn(state: AlgorithmState, pairs: list[tuple[float, float]]) -> None:
        for kl, entropy in pairs:
            state.after_update({"policy/kl_reference": kl, "policy/entropy": entropy}, num_samples=16)

    learn(straight, measurements)
    learn(first, measurements[:2])
    second = AlgorithmState.of(config)
    second.restore(json.loads(json.dumps(first.state())))
    learn(second, measurements[2:])
    assert second.coefficients() == straight.coefficients()
    assert second.state() == straight.state()
