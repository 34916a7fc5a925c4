"""Policy and value loss as called: splits, weights, metrics, refusals; and the value loss's numbers."""

import pytest
import torch
from torch import Tensor

from mrl.algorithms.losses import policy_loss, value_loss
from mrl.algorithms.policy_losses import LOSSES


def call(name: str, part, logprobs: Tensor, **options) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(
        name,
        logprobs=logprobs,
        old_logprobs=part.arrays["old_logprobs"],
        advantages=part.arrays["advantages"],
        loss_mask=part.mask,
        segment_ids=part.segment_ids,
        **options,
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_order_and_layout_gives_the_same_loss_gradient_and_metrics(
    name, aggregation, batch
) -> None:
    whole = batch.arrays["logprobs"].clone().requires_grad_()
    total, metrics = call(name, batch, whole, aggregation=aggregation, num_tokens=int(batch.mask.sum()))
    total.backward()
    variable = batch.arrays["logprobs"].clone().requires_grad_()
    shares, found = [], []
    for rows in ([4, 0, 9], [11, 3], [1, 10, 2, 7, 5, 8, 6]):
        arrays = batch.arrays | {"logprobs": variable}
        part = type(batch)(arrays, batch.mask, batch.group_ids).packed(rows)
        loss, numbers = call(
            name,
            part,
            part.arrays["logprobs"],
            aggregation=aggregation,
            num_tokens=int(batch.mask.sum()),
            num_sequences=int(batch.mask.any(1).sum()),
        )
        shares.append(loss)
        found.append(numbers)
    torch.stack(shares).sum().backward()
    assert float(sum(shares).detach()) == pytest.approx(float(total.detach()), abs=1e-14)
    torch.testing.assert_close(variable.grad, whole.grad, atol=1e-15, rtol=0)
    for key, value in metrics.items():
        combine = max if key.endswith("_max") else sum
        assert combine(float(n[key]) for n in found) == pytest.approx(float(value), abs=1e-12), key


@pytest.mark.parametrize("name", LOSSES)
def test_sequences_cut_over_ranks_give_the_same_loss_and_gradient(name, batch) -> None:
    """Two context-parallel halves; the hook adds the other half's sums."""
    packed = batch.packed()
    whole = packed.arrays["logprobs"].clone().requires_grad_()
    shared = {"aggregation": "sequence_mean", "num_tokens": int(packed.mask.sum()), "num_sequences": 11}
    total, _ = call(name, packed, whole, **shared)
    total.backward()
    variable = packed.arrays["logprobs"].clone().requires_grad_()
    halves = [torch.arange(len(packed.mask)) % 2 == rank for rank in range(2)]
    counts = torch.zeros(12, dtype=torch.float64).index_add(0, packed.segment_ids, packed.mask.double())
    difference = (packed.arrays["logprobs"] - packed.arrays["old_logprobs"]) * packed.mask
    log_ratio_sums = torch.zeros(12, dtype=torch.float64).index_add(0, packed.segment_ids, difference)

    def reduce(sums: Tensor) -> Tensor:
        return counts if bool((sums == sums.round()).all()) else log_ratio_sums

    shares = []
    for half in halves:
        part = type(batch)(
            {n: v[half] for n, v in packed.arrays.items()},
            packed.mask[half],
            batch.group_ids,
            packed.segment_ids[half],
        )
        shares.append(call(name, part, variable[half], num_segments=12, reduce=reduce, **shared)[0])
    torch.stack(shares).sum().backward()
    assert float(sum(shares).detach()) == pytest.approx(float(total.detach()), abs=1e-14)
    torch.testing.assert_close(variable.grad, whole.grad, atol=1e-15, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_of_the_environment_may_hold_anything(name, batch) -> None:
    wild = {n: v.masked_fill(~batch.mask, float("-inf")) for n, v in batch.arrays.items()}
    variable = wild["logprobs"].clone().requires_grad_()
    loss, _ = call(name, type(batch)(wild, batch.mask, batch.group_ids), variable)
    loss.backward()
    clean, _ = call(name, batch, batch.arrays["logprobs"])
    assert torch.equal(loss.detach(), clean)
    assert bool(torch.isfinite(variable.grad).all())
    assert not bool(variable.grad[~batch.mask].any())


def test_weights_multiply_tokens_and_leave_the_denominator(batch) -> None:
    weights = torch.full_like(batch.arrays["logprobs"], 0.5)
    half, _ = call("ppo_clip", batch, batch.arrays["logprobs"], weights=weights)
    whole, _ = call("ppo_clip", batch, batch.arrays["logprobs"])
    assert float(half) == pytest.approx(float(whole) / 2, abs=1e-15)


def test_metrics_of_a_worked_case() -> None:
    ratio = torch.tensor([[2.0, 0.5, 1.0, 9.0]], dtype=torch.float64)
    _, metrics = policy_loss(
        "ppo_clip",
        logprobs=ratio.log(),
        old_logprobs=torch.zeros(1, 4, dtype=torch.float64),
        advantages=torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[1, 1, 1, 0]]),
    )
    assert float(metrics["policy/clip_frac_high"]) == pytest.approx(1 / 3)
    assert float(metrics["policy/clip_frac_low"]) == pytest.approx(1 / 3)
    assert float(metrics["policy/ratio_max"]) == pytest.approx(2.0)
    assert float(metrics["policy/ratio_mean"]) == pytest.approx(3.5 / 3)
    assert float(metrics["policy/kl_old"]) == pytest.approx(
        (1 - 0.6931471805599453 - 0.5 + 0.6931471805599453) / 3
    )


def test_sequences_without_tokens_are_counted(batch) -> None:
    _, metrics = call("gspo", batch, batch.arrays["logprobs"])
    assert float(metrics["policy/empty_sequences"]) == 1.0


class TestBadInput:
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3),
    }

    @pytest.mark.parametrize("argument", ["logprobs", "old_logprobs", "advantages"])
    def test_not_finite_names_argument_and_sample(self, argument) -> None:
        values = torch.zeros(2, 3)
        values[1, 0] = float("nan")
        with pytest.raises(ValueError, match=rf"^{argument}: nan in sample 1 "):
            policy_loss("ppo_clip", **(self.arguments | {argument: values}))

    @pytest.mark.parametrize("argument", ["logprobs", "old_logprobs", "advantages"])
    def test_shape_and_dtype(self, argument) -> None:
        with pytest.raises(ValueError, match=rf"^{argument}: shape \(3, 2\)"):
            policy_loss("ppo_clip", **(self.arguments | {argument: torch.zeros(3, 2)}))
        with pytest.raises(TypeError, match=rf"^{argument}: dtype torch.bfloat16"):
            policy_loss("ppo_clip", **(self.arguments | {argument: torch.zeros(2, 3).bfloat16()}))

    def test_names_and_options(self) -> None:
        with pytest.raises(ValueError, match=r"unknown policy loss 'ppo': .*known: cispo, dual_clip, gspo"):
            policy_loss("ppo", **self.arguments)
        with pytest.raises(ValueError, match="takes no tau; it takes: clip_low, clip_high, dual_clip"):
            policy_loss("ppo_clip", tau=1.0, **self.arguments)
        with pytest.raises(ValueError, match=r"dual_clip = 0.5: must be above 1"):
            policy_loss("dual_clip", dual_clip=0.5, **self.arguments)
        with pytest.raises(ValueError, match=r"scores: shape \(3,\), expected \[2\]"):
            policy_loss("topr", scores=torch.zeros(3), **self.arguments)

    def test_a_wild_ratio_stays_finite(self) -> None:
        variable = torch.full((2, 3), -1.0).requires_grad_()
        wild = self.arguments | {"old_logprobs": torch.full((2, 3), -500.0), "logprobs": variable}
        for name in LOSSES:
            variable.grad = None
            loss, _ = policy_loss(name, **(wild | {"advantages": torch.full((2, 3), -1.0)}))
            loss.backward()
            assert bool(torch.isfinite(loss)), name
            assert bool(torch.isfinite(variable.grad).all()), name


@pytest.mark.parametrize(
    ("variant", "clip", "aggregation"),
    [
        ("openrlhf/trl token-mean clip 0.5", 0.5, "token_mean"),
        ("trl token-mean clip 0.2", 0.2, "token_mean"),
        ("roll seq-mean no clip (default)", None, "sequence_mean"),
        ("roll seq-mean clip 0.5", 0.5, "sequence_mean"),
    ],
)
def test_value_loss(golden, variant, clip, aggregation) -> None:
    case = golden("D15")
    loss, metrics = value_loss(
        values=case.tensor(case.inputs["values"]),
        old_values=case.tensor(case.inputs["old"]),
        returns=case.tensor(case.inputs["returns"]),
        loss_mask=case.tensor(case.inputs["mask"]),
        clip=clip,
        aggregation=aggregation,
    )
    case.check(loss, case.expected[variant])
    if clip == 0.2:
        expected = case.expected["clip fraction at 0.2 (clipped term larger)"]
        assert float(metrics["critic/clip_frac"]) == pytest.approx(expected)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_value_gradient_against_finite_differences(clip, aggregation, batch) -> None:
    def loss(values: Tensor) -> Tensor:
        return value_loss(
            values=values,
            old_values=batch.arrays["values"],
            returns=batch.arrays["returns"],
            loss_mask=batch.mask,
            clip=clip,
            aggregation=aggregation,
        )[0]

    start = batch.arrays["values"] + batch.arrays["advantages"] / 4
    variable = start.clone().requires_grad_()
    loss(variable).backward()
    for row, column in [(0, 0), (2, 1), (5, 3), (6, 2), (8, 0), (10, 4), (3, 1)]:
        bump = torch.zeros_like(start)
        bump[row, column] = 1e-6
        slope = (loss(start + bump) - loss(start - bump)) / 2e-6
        assert float(variable.grad[row, column]) == pytest.approx(float(slope), abs=1e-8)


def test_value_loss_refuses() -> None:
    arguments = {name: torch.zeros(2, 3) for name in ("values", "old_values", "returns")}
    arguments["loss_mask"] = torch.ones(2, 3)
    with pytest.raises(ValueError, match="clip = 0"):
        value_loss(clip=0.0, **arguments)
    with pytest.raises(ValueError, match="returns: inf in sample 0"):
        value_loss(**(arguments | {"returns": torch.full((2, 3), float("inf"))}))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mask_without_tokens_gives_zero_and_is_counted(name, aggregation) -> None:
    variable = torch.full((2, 3), float("nan"), dtype=torch.float64).requires_grad_()
    loss, metrics = policy_loss(
        name,
        logprobs=variable,
        old_logprobs=torch.zeros(2, 3, dtype=torch.float64),
        advantages=torch.ones(2, 3, dtype=torch.float64),
        loss_mask=torch.zeros(2, 3),
        aggregation=aggregation,
        constant=4.0 if aggregation == "constant" else None,
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(variable.grad, torch.zeros(2, 3, dtype=torch.float64))
    assert float(metrics["policy/empty_sequences"]) == 2.0
    assert all(bool(torch.isfinite(value)) for value in metrics.values())
