"""Every preference loss and its gradient against TRL's own functions; microbatches do not matter."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from mrl.algorithms.preference import (
    PAIR_LOSSES,
    PreferenceObjective,
    Side,
    kto_losses,
    pair_loss_of,
    try_pair_loss,
)
from mrl.algorithms.tokens import Segments
from mrl.config.sections.tune import READS, ObjectiveSection
from mrl.errors import ConfigError

CASES = json.loads((Path(__file__).parent / "preference_cases.json").read_text())
INPUTS = CASES["inputs"]
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo"},
    "dpo mean": {"name": "dpo", "length": "mean"},
    "dpo smoothing": {"name": "dpo", "smoothing": 0.1},
    "robust": {"name": "robust", "smoothing": 0.1},
    "exo": {"name": "exo", "smoothing": 0.001},
    "hinge": {"name": "hinge"},
    "ipo mean": {"name": "ipo", "length": "mean"},
    "ipo sum": {"name": "ipo", "length": "sum"},
    "apo_zero": {"name": "apo_zero"},
    "apo_down": {"name": "apo_down"},
    "simpo": {"name": "simpo", "beta": 2.0, "gamma_over_beta": 0.5},
    "simpo smoothing": {"name": "simpo", "beta": 2.0, "gamma_over_beta": 0.5, "smoothing": 0.1},
}


def sides(logprobs: Tensor | None = None) -> tuple[Side, Side]:
    """Return the two pairs; `logprobs` [4] replace theirs, chosen ones first."""
    policy = torch.tensor(INPUTS["policy_chosen"] + INPUTS["policy_rejected"], dtype=torch.float64)
    policy = policy if logprobs is None else logprobs
    reference = torch.tensor(INPUTS["ref_chosen"] + INPUTS["ref_rejected"], dtype=torch.float64)
    lengths = torch.tensor(INPUTS["len_chosen"] + INPUTS["len_rejected"], dtype=torch.float64)
    return Side(policy[:2], reference[:2], lengths[:2]), Side(policy[2:], reference[2:], lengths[2:])


@pytest.mark.parametrize("case", SETTINGS)
def test_the_loss_is_the_published_one(case: str) -> None:
    section = ObjectiveSection(**SETTINGS[case])
    losses = pair_loss_of(section)(section, *sides())
    assert losses.mean().item() == pytest.approx(CASES["losses"][case]["loss"], abs=1e-6)


def test_orpo_is_the_published_ratio_and_the_responses_own_loss() -> None:
    section = ObjectiveSection(name="orpo")
    losses = pair_loss_of(section)(section, *sides())
    expected = CASES["losses"]["orpo ratio term"]["loss"] + CASES["losses"]["sft_weight"]["loss"]
    assert losses.mean().item() == pytest.approx(expected, abs=1e-6)


def test_the_gradients_are_the_published_ones() -> None:
    """Nine losses' gradient norms must agree on four unknowns: the norms of the log-probs' gradients."""
    known, norms = [], []
    for case, figures in CASES["losses"].items():
        if "grad" not in figures:
            continue
        logprobs = torch.tensor(INPUTS["policy_chosen"] + INPUTS["policy_rejected"], dtype=torch.float64)
        logprobs.requires_grad_()
        if case == "sft":
            loss = -logprobs[:2].sum() / sum(INPUTS["len_chosen"])
        else:
            section = ObjectiveSection(**SETTINGS[case])
            loss = pair_loss_of(section)(section, *sides(logprobs)).mean()
        (gradient,) = torch.autograd.grad(loss, logprobs)
        known.append((gradient / figures["grad"]).square().numpy())
        norms.append(1.0)
    assert len(norms) == 9
    lengths, _, rank, _ = np.linalg.lstsq(np.array(known), np.array(norms), rcond=None)
    assert rank == 4 and (lengths > 0).all()
    np.testing.assert_allclose(np.sqrt(np.array(known) @ lengths), norms, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "weights"), [("plain", (1.0, 1.0)), ("weighted", (1.0, 1.33)), ("clamped", (1.0, 1.0))]
)
def test_kto_is_the_published_one(case: str, weights: tuple[float, float]) -> None:
    expected, z = CASES["kto"][case]
    section = ObjectiveSection(name="kto", desirable_weight=weights[0], undesirable_weight=weights[1])
    chosen, rejected = sides()
    both = Side(*(torch.cat([getattr(s, name) for s in (chosen, rejected)]) for name in Side.__slots__))
    wanted = torch.tensor([True, True, False, False])
    losses = kto_losses(section, both, wanted, torch.tensor(z, dtype=torch.float64))
    assert losses.mean().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", [*SETTINGS, "sft_weight"])
def test_shares_of_single_pairs_add_up_to_the_whole(case: str) -> None:
    """Loss, gradient and metrics of a microbatch are the sums over its single pairs."""
    settings = {"name": "dpo", "sft_weight": 0.7} if case == "sft_weight" else SETTINGS[case]
    objective = PreferenceObjective(ObjectiveSection(**settings))
    lengths, generator = np.array([4, 6, 3, 9, 5, 5]), np.random.default_rng(0)
    values = torch.from_numpy(-generator.random(lengths.sum()))
    mask = torch.from_numpy(np.concatenate([np.arange(n) >= 2 for n in lengths]))
    known = {"side": np.array([1.0, 0] * 3), "ref_logprob": -4 * generator.random(6)}

    def share(samples: np.ndarray) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        selected = np.isin(np.repeat(np.arange(6), lengths), samples)
        logprobs = values[selected].clone().requires_grad_()
        loss, metrics = objective(
            logprobs=logprobs,
            entropy=logprobs.detach(),
            arrays={"loss_mask": mask[selected]},
            segments=Segments.of(lengths[samples], values={n: v[samples] for n, v in known.items()}),
            denominators={"num_rows": 3.5},
        )
        return loss.detach(), metrics, torch.autograd.grad(loss, logprobs)[0]

    whole = share(np.arange(6))
    parts = [share(np.array([2 * p, 2 * p + 1])) for p in range(3)]
    assert whole[0].item() == pytest.approx(sum(p[0].item() for p in parts), abs=1e-12)
    torch.testing.assert_close(whole[2], torch.cat([p[2] for p in parts]), rtol=0, atol=1e-12)
    for name, value in whole[1].items():
        assert value.item() == pytest.approx(sum(p[1][name].item() for p in parts), abs=1e-12)


def test_without_a_margin_dpo_is_ln_2_and_pairs_turned_round_are_mirrored() -> None:
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    equal = Side(zero, zero, one)
    for settings in ({"name": "dpo"}, {"name": "robust", "smoothing": 0.2}):
        section = ObjectiveSection(**settings)
        assert pair_loss_of(section)(section, equal, equal).item() == pytest.approx(math.log(2))
    section = ObjectiveSection(name="dpo", smoothing=0.25)
    chosen, rejected = sides()
    plain, turned = (pair_loss_of(section)(section, *p) for p in ((chosen, rejected), (rejected, chosen)))
    margin = section.beta * (chosen.ratio(section) - rejected.ratio(section))
    torch.testing.assert_close(turned - plain, (1 - 2 * section.smoothing) * margin)


def test_every_objective_and_every_setting_it_reads_changes_the_loss() -> None:
    """If a setting is accepted but not read, something other than the request is trained."""
    changed = {"beta": 0.3, "length": "mean", "smoothing": 0.2, "gamma_over_beta": 1.5}
    base = {"ipo": {"length": "sum"}, "exo": {"smoothing": 0.1}, "robust": {"smoothing": 0.1}}
    losses = {}
    for name in PAIR_LOSSES:
        section = ObjectiveSection(name=name, **base.get(name, {}))
        losses[name] = pair_loss_of(section)(section, *sides()).mean().item()
        for setting in READS[name] & changed.keys():
            other = section.model_copy(update={setting: changed[setting]})
            assert pair_loss_of(other)(other, *sides()).mean().item() != pytest.approx(
                losses[name], abs=1e-6
            ), (name, setting)
    values = sorted(losses.values())
    assert min(b - a for a, b in itertools.pairwise(values)) > 1e-6, losses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "hinge", "smoothing": 0.1}, "not read by hinge"),
        ({"name": "sft", "beta": 0.2}, "not read by sft"),
        ({"name": "reward_model", "beta": 0.3}, "not read by reward_model"),
        ({"name": "dpo", "center": {"weight": 0.1}}, "not read by dpo"),
        ({"name": "ipo"}, "required by ipo"),
        ({"name": "exo"}, "exo takes its logarithm"),
        ({"name": "custom"}, "set package.module:function"),
        ({"name": "dpo_norm"}, "unknown tune.objective"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveSection(**settings)


def shifted(section: ObjectiveSection, chosen: Side, rejected: Side, *, by: float) -> Tensor:
    """A loss as users write them."""
    return rejected.ratio(section) - chosen.ratio(section) + by


def test_a_loss_of_the_users_own_is_imported_with_its_options() -> None:
    section = ObjectiveSection(name="custom", function=f"{__name__}:shifted", options={"by": 2.0})
    chosen, rejected = sides()
    margin = chosen.ratio(section) - rejected.ratio(section)
    torch.testing.assert_close(pair_loss_of(section)(section, chosen, rejected), 2.0 - margin)
    with pytest.raises(ConfigError, match="nobody"):
        pair_loss_of(ObjectiveSection(name="custom", function="nobody.knows:it"))


def mistaken(section: ObjectiveSection, chosen: Side, rejected: Side, *, gives: str) -> Any:
    margin = chosen.ratio(section) - rejected.ratio(section)
    if gives == "raises":
        return margin + chosen.lengths  # type: ignore[attr-defined]
    return {"a sum": margin.sum(), "no gradient": margin.detach(), "nan": margin * float("nan")}[gives]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "called as shifted\\(section, chosen, rejected\\), but has the signature"),
        ({"gives": "raises"}, "it raised AttributeError: 'Side' object has no attribute 'lengths'"),
        ({"gives": "a sum"}, "it returned \\[\\], not a tensor with one value per pair"),
        ({"gives": "no gradient"}, "no gradient to the log-probs"),
        ({"gives": "nan"}, "it returned \\[nan, nan\\]"),
    ],
)
def test_a_loss_of_the_users_own_is_tried_before_ranks_start(options: dict[str, str], message: str) -> None:
    try_pair_loss(ObjectiveSection(name="custom", function=f"{__name__}:shifted", options={"by": 2.0}))
    function = "mistaken" if options else "shifted"
    with pytest.raises(ConfigError, match=f"tune.objective.function = .*{message}"):
        try_pair_loss(
            ObjectiveSection(name="custom", function=f"{__name__}:{function}", options=dict(options))
        )
