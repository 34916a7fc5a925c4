"""The objective: same loss and gradient for any split, every term, old log-prob modes, refusals."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import kl
from mrl.algorithms.losses import PerToken, Tokens, reinforce, try_loss
from mrl.algorithms.objective import Objective, ValueObjective
from mrl.algorithms.tokens import NotFiniteError
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.correction import CORRECTION_KINDS
from mrl.config.sections.policy_loss import CustomLoss
from mrl.errors import ConfigError
from tests.mrl.algorithms.padded import NAMES, aggregate, bounds_of, policy_loss, segments_of

EVERYTHING = {
    "kl": {"location": "loss", "kind": "k3", "coefficient": 0.3, "unbiased": True},
    "entropy": {"coefficient": 0.2},
    "correction": {"kind": "truncated", "high": 1.1},
}


def arrays_of(part) -> dict[str, Tensor]:
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    return {name: part.arrays[name] for name in names} | {"loss_mask": part.mask}


def run(
    config: AlgorithmSection, part, logprobs: Tensor, entropy: Tensor, **changed
) -> tuple[Tensor, dict[str, Tensor]]:
    return Objective(config)(
        logprobs=logprobs,
        entropy=entropy,
        arrays=changed.pop("arrays", arrays_of(part)),
        segments=segments_of(part.mask, part.segment_ids),
        denominators={"num_tokens": 50.0, "num_sequences": 11.0} | changed,
    )


@pytest.mark.parametrize(
    "aggregation", [{"mode": "token_mean"}, {"mode": "sequence_mean"}, {"mode": "constant", "length": 8}]
)
@pytest.mark.parametrize("name", NAMES)
def test_shares_of_microbatches_add_up(name, aggregation, batch) -> None:
    spec = AlgorithmSection.model_validate(EVERYTHING | {"loss": {"name": name}, "aggregation": aggregation})
    whole = {key: batch.arrays[key].clone().requires_grad_() for key in ("logprobs", "entropy")}
    packed = type(batch)(batch.arrays | whole, batch.mask, batch.group_ids).packed()
    total, metrics = run(spec, packed, packed.arrays["logprobs"], packed.arrays["entropy"])
    total.backward()
    split = {key: batch.arrays[key].clone().requires_grad_() for key in ("logprobs", "entropy")}
    shares, figures = [], []
    for rows in ([4, 0, 9], [11, 3], [1, 10, 2, 7, 5, 8, 6]):
        part = type(batch)(batch.arrays | split, batch.mask, batch.group_ids).packed(rows)
        loss, numbers = run(spec, part, part.arrays["logprobs"], part.arrays["entropy"])
        shares.append(loss)
        figures.append(numbers)
    torch.stack(shares).sum().backward()
    assert float(sum(shares).detach()) == pytest.approx(float(total.detach()), abs=1e-13)
    for key in whole:
        torch.testing.assert_close(split[key].grad, whole[key].grad, atol=1e-15, rtol=0)
        assert float(whole[key].grad.abs().max()) > 0
    for key, value in metrics.items():
        combine = max if key.endswith("_max") else sum
        assert combine(float(n[key]) for n in figures) == pytest.approx(float(value), abs=1e-12), key


def test_terms_are_policy_times_weights_plus_kl_minus_entropy(batch) -> None:
    packed = batch.packed()
    config = AlgorithmSection.model_validate(
        {
            "kl": {"location": "loss", "kind": "k2", "coefficient": 0.3},
            "entropy": {"coefficient": 0.2},
            "correction": {"kind": "icepop", "low": 0.8, "high": 1.2},
            "aggregation": {"mode": "token_mean"},
        }
    )
    loss, metrics = run(config, packed, packed.arrays["logprobs"], packed.arrays["entropy"])
    a, ids = packed.arrays, {"segment_ids": packed.segment_ids, "num_tokens": 50.0}
    ratio = torch.exp(a["old_logprobs"] - a["rollout_logprobs"])
    policy, _ = policy_loss(
        "ppo_clip",
        logprobs=a["logprobs"],
        old_logprobs=a["old_logprobs"],
        advantages=a["advantages"],
        loss_mask=packed.mask,
        weights=ratio.masked_fill((ratio < 0.8) | (ratio > 1.2), 0.0),
        **ids,
    )
    divergence = aggregate(
        kl.estimate_kl(config.kl.kind, a["logprobs"] - a["ref_logprobs"])[0], packed.mask, "token_mean", **ids
    )
    entropy = aggregate(a["entropy"], packed.mask, "token_mean", **ids)
    assert float(loss) == pytest.approx(float(policy + 0.3 * divergence - 0.2 * entropy), abs=1e-14)
    assert float(metrics["policy/entropy"]) == pytest.approx(float(entropy), abs=1e-14)
    assert float(metrics["policy/kl_reference"]) == pytest.approx(float(divergence), abs=1e-14)
    moved, _ = run(config, packed, a["logprobs"], a["entropy"], entropy_coefficient=0.5)
    assert float(moved) == pytest.approx(float(policy + 0.3 * divergence - 0.5 * entropy), abs=1e-14)


def test_old_logprob_modes(batch) -> None:
    packed = batch.packed()
    a = packed.arrays

    def loss(arrays: dict[str, Tensor], **config) -> float:
        section = AlgorithmSection.model_validate(config)
        return float(run(section, packed, a["logprobs"], a["entropy"], arrays=arrays)[0])

    def by_hand(old: Tensor, weights: Tensor | None = None) -> float:
        value, _ = policy_loss(
            "ppo_clip",
            logprobs=a["logprobs"],
            old_logprobs=old,
            advantages=a["advantages"],
            loss_mask=packed.mask,
            segment_ids=packed.segment_ids,
            aggregation="sequence_mean",
            num_sequences=11,
            weights=weights,
        )
        return float(value)

    every = arrays_of(packed)
    assert loss(every) == pytest.approx(by_hand(a["old_logprobs"]), abs=1e-14)
    assert loss(every, old_logprobs="rollout") == pytest.approx(by_hand(a["rollout_logprobs"]), abs=1e-14)
    weights = torch.exp(a["old_logprobs"] - a["rollout_logprobs"]).clamp(max=1.1)
    corrected = loss(every, correction={"kind": "truncated", "high": 1.1})
    assert corrected == pytest.approx(by_hand(a["old_logprobs"], weights), abs=1e-14)
    without = {name: values for name, values in every.items() if name != "old_logprobs"}
    assert loss(without) == pytest.approx(by_hand(a["logprobs"]), abs=1e-14)
    with pytest.raises(ValueError, match=r"no old_logprobs, but epochs = 2 and minibatches = 3"):
        loss(without, epochs=2, minibatches=3)


@pytest.mark.parametrize(
    ("missing", "config", "match"),
    [
        ("advantages", {}, r"no advantages, which comes from the advantage estimator"),
        ("ref_logprobs", {"kl": {"location": "loss", "coefficient": 0.1}},
         r"no ref_logprobs, .*kl\.location = loss"),
        ("rollout_logprobs", {"correction": {"kind": "icepop"}},
         r"no rollout_logprobs, .*correction\.kind = icepop"),
        ("rollout_logprobs", {"old_logprobs": "rollout"}, "no rollout_logprobs"),
    ],
)  # fmt: skip
def test_a_missing_array_names_its_source(missing, config, match, batch) -> None:
    packed = batch.packed()
    arrays = {name: values for name, values in arrays_of(packed).items() if name != missing}
    section = AlgorithmSection.model_validate(config)
    with pytest.raises(ValueError, match=match):
        run(section, packed, packed.arrays["logprobs"], packed.arrays["entropy"], arrays=arrays)


def scaled_reinforce(tokens: Tokens, *, factor: float = 1.0) -> PerToken:
    """A user's loss, found by its path."""
    plain = reinforce(tokens)
    return PerToken(factor * plain.loss, plain.ratio, plain.clipped_low, plain.clipped_high)


def test_a_users_function_by_path(batch) -> None:
    packed = batch.packed()
    a = packed.arrays
    custom = {"name": "custom", "function": f"{__name__}:scaled_reinforce", "options": {"factor": 3.0}}
    loss, _ = run(AlgorithmSection.model_validate({"loss": custom}), packed, a["logprobs"], a["entropy"])
    plain, _ = run(
        AlgorithmSection.model_validate({"loss": {"name": "reinforce"}}), packed, a["logprobs"], a["entropy"]
    )
    assert float(loss) == pytest.approx(3 * float(plain), abs=1e-13)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": "nowhere:loss"},
         r"function = 'nowhere:loss': nowhere cannot be imported: ModuleNotFound"),
        ({"function": f"{__name__}:scaled"}, r"has no function 'scaled'; it has .*scaled_reinforce"),
        ({"options": {"faktor": 2.0}},
         r"called as scaled_reinforce\(tokens, faktor=...\), but has the signature"),
    ],
)  # fmt: skip
def test_a_users_function_that_cannot_be_called_is_refused_when_it_is_named(changes, message) -> None:
    custom = {"name": "custom", "function": f"{__name__}:scaled_reinforce", "options": {"factor": 3.0}}
    with pytest.raises(ConfigError, match=message):
        Objective(AlgorithmSection.model_validate({"loss": custom | changes}))


def test_a_users_function_is_found_in_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "own_loss.py"
    file.write_text(
        "from mrl.algorithms.losses import reinforce\n\ndef plain(tokens):\n    return reinforce(tokens)\n"
    )
    try_loss(CustomLoss(function=f"{file}:plain"))
    with pytest.raises(
        ConfigError, match=r"own_loss\.py has no function 'plane'; it has \['plain', 'reinforce'\]"
    ):
        try_loss(CustomLoss(function=f"{file}:plane"))
    with pytest.raises(ConfigError, match=r"algorithm.loss.function: no file .*gone\.py"):
        try_loss(CustomLoss(function=f"{tmp_path}/gone.py:plain"))


def damped(tokens: Tokens, *, raises: bool = False, gives: str = "") -> Any:
    """A user's loss with the mistakes that users make."""
    plain = reinforce(tokens)
    if raises:
        tokens.ratioo()  # type: ignore[attr-defined]
    if gives == "a sum":
        return dataclasses.replace(plain, loss=plain.loss.sum())
    if gives == "no gradient":
        return dataclasses.replace(plain, loss=plain.loss.detach())
    if gives == "infinite":
        return dataclasses.replace(plain, loss=plain.loss / 0.0)
    if gives == "the loss alone":
        return plain.loss
    assert tokens.scores is not None
    return dataclasses.replace(plain, loss=plain.loss * (tokens.scores + 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"raises": True}, "it raised AttributeError: 'Tokens' object has no attribute 'ratioo'"),
        ({"gives": "a sum"}, r"loss of its result is \[\], not a tensor with one value per token, \[5\]"),
        ({"gives": "no gradient"}, "its loss has no gradient to tokens.logprobs"),
        ({"gives": "infinite"}, "its loss is .*inf"),
        ({"gives": "the loss alone"}, "it returned Tensor, not mrl.algorithms.losses.PerToken"),
    ],
)
def test_a_users_loss_with_a_mistake_inside_is_refused_before_it_sees_a_batch(options, message) -> None:
    function = f"{__name__}:damped"
    try_loss(CustomLoss(function=function))
    with pytest.raises(ConfigError, match=f"algorithm.loss.function = '{function}': a trial .*{message}"):
        try_loss(CustomLoss(function=function, options=options))


def test_a_users_module_that_ends_the_process_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^algorithm.loss.function = \S+: \S+leaving_module cannot be imported: SystemExit: 0$",
    ):
        try_loss(CustomLoss(function="tests.support.leaving_module:loss"))


def test_value_objective_shares_add_up(batch) -> None:
    config = AlgorithmSection.model_validate({"estimator": {"name": "gae"}})

    def share(part) -> float:
        loss, _ = ValueObjective(config)(
            values=part.arrays["values"] + part.arrays["advantages"],
            arrays={n: part.arrays[n] for n in ("values", "returns")} | {"loss_mask": part.mask},
            segments=segments_of(part.mask, part.segment_ids),
            denominators={"num_tokens": 50.0, "num_sequences": 11.0},
        )
        return float(loss)

    parts = [batch.packed(rows) for rows in ([4, 0, 9], [11, 3], [1, 10, 2, 7, 5, 8, 6])]
    assert sum(share(part) for part in parts) == pytest.approx(share(batch.packed()), abs=1e-14)


@pytest.mark.parametrize("name", ["logprobs", "entropy", "advantages", "rollout_logprobs", "old_logprobs"])
def test_what_is_not_finite_is_named_with_its_sample(name, batch) -> None:
    packed = batch.packed()
    values = packed.arrays[name].clone()
    position = int(packed.mask.nonzero()[20])
    values[position] = float("nan")
    values[~packed.mask] = float("inf")
    fields = {key: packed.arrays[key] for key in ("logprobs", "entropy")}
    arrays = arrays_of(packed)
    (fields if name in fields else arrays)[name] = values
    sample = int(packed.segment_ids[position])
    with pytest.raises(NotFiniteError, match=rf"^{name}: nan in sample {sample} "):
        run(AlgorithmSection(), packed, fields["logprobs"], fields["entropy"], arrays=arrays)


@pytest.mark.parametrize("loss", NAMES)
@pytest.mark.parametrize("kind", typing.get_args(CORRECTION_KINDS))
@pytest.mark.parametrize("wild", [-100.0, float("-inf"), float("nan"), 1e30])
def test_what_stands_off_the_mask_reaches_neither_gradient_nor_metric(wild, kind, loss, batch) -> None:
    """exp of an untrained token's engine log-prob may overflow, and 0 times infinity is not 0."""
    packed = batch.packed()
    bounds = bounds_of(kind, low=0.9, high=1.1)
    section = AlgorithmSection.model_validate(
        EVERYTHING | {"loss": {"name": loss}, "correction": {"kind": kind} | bounds}
    )
    outcomes = []
    for value in (0.0, wild):
        fields = {
            name: packed.arrays[name].masked_fill(~packed.mask, value).requires_grad_()
            for name in ("logprobs", "entropy")
        }
        arrays = {
            name: array if name == "loss_mask" else array.masked_fill(~packed.mask, value)
            for name, array in arrays_of(packed).items()
        }
        total, metrics = run(section, packed, fields["logprobs"], fields["entropy"], arrays=arrays)
        total.backward()
        outcomes.append((total.item(), *(field.grad for field in fields.values()), metrics))
    (loss_of_none, *gradients, plain), (loss_of_wild, *others, metrics) = outcomes
    assert loss_of_none == loss_of_wild
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, others, strict=True))
    assert {name: float(value) for name, value in metrics.items()} == {n: float(v) for n, v in plain.items()}
