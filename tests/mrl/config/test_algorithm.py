"""The algorithm section: defaults, names, and combinations that cannot work."""

import subprocess
import sys
import typing

import pytest
from pydantic import ValidationError

from mrl.algorithms.advantages import ESTIMATORS
from mrl.algorithms.kl import KINDS
from mrl.algorithms.losses import LOSSES
from mrl.config.sections import algorithm, policy_loss
from mrl.config.sections.algorithm import AlgorithmSection


def test_names_of_the_section_are_those_of_the_blocks() -> None:
    assert set(typing.get_args(algorithm._Estimators)) == {*ESTIMATORS, "custom"}
    assert set(policy_loss.LOSSES) == set(LOSSES) | {policy_loss.CustomLoss}
    assert set(typing.get_args(algorithm._KlKinds)) == set(KINDS)


def test_default_is_grpo_without_kl() -> None:
    section = AlgorithmSection()
    assert (section.estimator.name, section.loss.name, section.aggregation.mode) == (
        "grpo",
        "ppo_clip",
        "sequence_mean",
    )
    assert section.kl.location == section.correction.kind == "off"
    assert not section.needs_reference
    assert not section.needs_values
    assert AlgorithmSection.model_validate(section.model_dump(mode="json")) == section


def test_each_loss_and_each_correction_has_its_own_default_bounds() -> None:
    """IcePop and TIS use their papers' bounds; the other corrections use their frameworks' bounds."""
    losses = {"ppo_clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
    for name, bounds in losses.items():
        loss = AlgorithmSection.model_validate({"loss": {"name": name}}).loss
        assert (loss.clip_low, loss.clip_high) == bounds
    corrections = {"truncated": (None, 2.0), "icepop": (0.5, 5.0), "sequence_mask": (0.999, 1.001)}
    for kind, bounds in (corrections | {"geometric": (None, 1.2)}).items():
        section = AlgorithmSection.model_validate({"correction": {"kind": kind}}).correction
        assert (getattr(section, "low", None), getattr(section, "high", None)) == bounds


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"loss": {"name": "cispi"}}, "unknown loss 'cispi': did you mean 'cispo'\\? known: ppo_clip, gspo"),
        ({"estimator": {"name": "grop"}}, "unknown estimator 'grop': did you mean 'grpo'\\? known: gae"),
        ({"kl": {"kind": "k4"}}, "unknown KL kind 'k4'.*known: k1, abs, k2, k3"),
        ({"correction": {"kind": "ice"}}, "unknown correction 'ice'.*icepop"),
        ({"aggregation": {"mode": "tokenmean"}}, "did you mean 'token_mean'"),
        ({"loss": {"name": "reinforce", "clip_low": 0.1}}, "Extra inputs are not permitted"),
        ({"loss": {"clip_high": -0.1}}, "greater than or equal to 0"),
        ({"loss": {"name": "custom", "function": "no colon"}}, "should match pattern"),
        ({"aggregation": {"mode": "constant"}}, "set a length with constant"),
        ({"aggregation": {"mode": "token_mean", "length": 5}}, "none with the other modes"),
        ({"kl": {"coefficient": 0.1}}, "set kl.location to reward or loss"),
        ({"kl": {"location": "loss"}}, "needs kl.coefficient above 0"),
        ({"kl": {"location": "reward", "coefficient": 1, "unbiased": True}},
         "unbiased needs kl.location = loss"),
        ({"entropy": {"target": 0}}, "greater than 0"),
        ({"correction": {"kind": "icepop", "low": 5}}, "must be below correction.high"),
        ({"correction": {"kind": "icepop", "token_weights": "raw"}}, "Extra inputs are not permitted"),
        ({"correction": {"high": 2.0}}, "high needs a correction.kind.*: truncated, icepop"),
        ({"kl": {"location": "loss", "kind": "k1", "coefficient": 0.1}}, "set kl.kind: k2"),
        ({"old_logprobs": "rollout", "correction": {"kind": "icepop"}}, "already contains the mismatch"),
        ({"old_logprobs": "decoupled"}, "would train tokens of earlier versions"),
        ({"estimator": {"name": "gdpo"}, "kl": {"location": "reward", "coefficient": 1}},
         "cannot use kl.location = reward"),
        ({"estimator": {"name": "rloo_process"}, "kl": {"location": "reward", "coefficient": 1}},
         "set kl.location = loss"),
        ({"estimator": {"name": "grpo_process"}, "kl": {"location": "reward", "coefficient": 1}},
         "set kl.location = loss"),
        ({"estimator": {"part_weights": {"a": 1}}}, "only read by gdpo"),
        ({"shaping": {"overlong": {"max_tokens": 5, "buffer_tokens": 6}}}, "exceeds max_tokens = 5"),
        ({"shaping": {"clip": [1, 1]}}, "the first value must be below the second"),
        ({"filter": {"min_reward_range": None}}, "are both null"),
        ({"filter": {"mean_range": [1, 0]}}, "the first value must be below the second"),
        ({"estimater": {}}, "Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_refusals(tree, match) -> None:
    with pytest.raises(ValidationError, match=match):
        AlgorithmSection.model_validate(tree)


def test_importing_the_section_imports_no_torch() -> None:
    code = "import sys, mrl.config.sections.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
