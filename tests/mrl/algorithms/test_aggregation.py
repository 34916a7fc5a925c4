"""The three modes, and that no split of a step changes them."""

import pytest
import torch

from mrl.algorithms.aggregation import MODES, aggregate


def test_golden_denominators(golden) -> None:
    case = golden("D13")
    loss, mask = case.tensor(case.inputs["token_loss"]), case.tensor(case.inputs["mask"])
    case.check(aggregate(loss, mask, "token_mean"), case.expected["global token mean (target)"])
    case.check(aggregate(loss, mask, "sequence_mean"), case.expected["global sequence mean"])
    parts = [
        aggregate(loss[rows], mask[rows], "token_mean", num_tokens=12)
        for rows in case.params["micro_batches"]
    ]
    case.check(torch.stack(parts).sum(), case.expected["global token mean (target)"])
    alone = [aggregate(loss[rows], mask[rows], "token_mean") for rows in case.params["micro_batches"]]
    case.check(torch.stack(alone), case.expected["two optimizer steps: own-step token mean"])


def test_constant_divides_by_sequences_times_length() -> None:
    loss = torch.tensor([[1.0, 2.0, 50.0], [3.0, 50.0, 50.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(aggregate(loss, mask, "constant", constant=4)) == pytest.approx(6 / (2 * 4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [[12], [1] * 12, [5, 4, 3], [2, 10]])
def test_splits_order_padding_and_packing_give_the_same_loss_and_gradient(mode, split, batch) -> None:
    constant = 7.0 if mode == "constant" else None
    whole = batch.arrays["logprobs"].clone().requires_grad_()
    total = aggregate(whole.square(), batch.mask, mode, constant=constant)
    total.backward()
    num_tokens, num_sequences = int(batch.mask.sum()), int(batch.mask.any(1).sum())
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6]
    variable = batch.arrays["logprobs"].clone().requires_grad_()
    parts, start = [], 0
    for size in split:
        rows = order[start : start + size]
        start += size
        piece = type(batch)({"x": variable[rows]}, batch.mask[rows], batch.group_ids[rows]).packed()
        parts.append(
            aggregate(
                piece.arrays["x"].square(),
                piece.mask,
                mode,
                segment_ids=piece.segment_ids,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                constant=constant,
            )
        )
    torch.stack(parts).sum().backward()
    assert float(sum(parts).detach()) == pytest.approx(float(total.detach()), abs=1e-14)
    torch.testing.assert_close(variable.grad, whole.grad, atol=1e-15, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_sequences_add_up_with_the_reduction_hook(mode, batch) -> None:
    """Context parallelism: every rank holds some tokens of every sequence; the hook sums per-sequence counts."""
    packed = batch.packed()
    counts = torch.zeros(12, dtype=torch.float64).index_add(0, packed.segment_ids, packed.mask.double())
    constant = 7.0 if mode == "constant" else None
    shared = {"num_tokens": int(packed.mask.sum()), "num_sequences": 11, "constant": constant}
    whole = aggregate(packed.arrays["logprobs"], packed.mask, mode, segment_ids=packed.segment_ids, **shared)
    parts = []
    for rank in range(3):
        mine = torch.arange(len(packed.mask)) % 3 == rank
        parts.append(
            aggregate(
                packed.arrays["logprobs"][mine],
                packed.mask[mine],
                mode,
                segment_ids=packed.segment_ids[mine],
                num_segments=12,
                reduce=lambda sums: counts,
                **shared,
            )
        )
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_without_tokens_gives_zero_and_no_gradient(mode) -> None:
    values = torch.full((2, 3), float("nan")).requires_grad_()
    loss = aggregate(values, torch.zeros(2, 3), mode, constant=5 if mode == "constant" else None)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(values.grad, torch.zeros(2, 3))


def test_bad_input() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=r"did you mean 'token_mean'\? known: constant, sequence_mean, token_mean"
    ):
        aggregate(ones, ones, "tokens_mean")
    with pytest.raises(ValueError, match="constant = None with aggregation 'constant'"):
        aggregate(ones, ones, "constant")
    with pytest.raises(ValueError, match=r"constant = 3.* the others take none"):
        aggregate(ones, ones, "token_mean", constant=3.0)
    with pytest.raises(ValueError, match="constant = -1"):
        aggregate(ones, ones, "constant", constant=-1.0)
    with pytest.raises(ValueError, match=r"per_token: shape \(2, 4\)"):
        aggregate(torch.ones(2, 4), ones, "token_mean")
