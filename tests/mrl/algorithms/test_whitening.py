"""Whitening: golden numbers, what is averaged over, short masks, ranks."""

import pytest
import torch

from mrl.algorithms.advantages import estimate
from mrl.algorithms.whitening import whiten


def test_golden_short_mask(golden) -> None:
    case = golden("I01")
    values, mask = case.tensor(case.inputs["values"]), case.tensor(case.inputs["mask"])
    case.check(whiten(values, mask), case.expected["whiten once"])
    case.check(whiten(values, mask, ddof=0, eps=0.0), case.expected["ddof0"])
    assert torch.equal(whiten(values, case.tensor([[0, 1, 0]])), values * case.tensor([[0, 1, 0]]))


def test_golden_prime(golden) -> None:
    case = golden("G02")
    rows = case.expected["combined_returns(coef 5 and 5)"]
    flat = case.tensor([x for row in rows for x in row])
    ids = torch.tensor([i for i, row in enumerate(rows) for _ in row])
    found = whiten(flat, torch.ones_like(flat), segment_ids=ids)
    case.check(found, [x for row in case.expected["whitened(ddof1)"] for x in row])


def test_reinforce_pp_baseline_whitens_by_token() -> None:
    """Two samples of 3 and 1 tokens, rewards 0 and 1: token mean of the baseline -0.25, variance by hand."""
    rewards = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, _ = estimate(
        "reinforce_pp_baseline", token_rewards=rewards, loss_mask=mask, group_ids=torch.tensor([0, 0])
    )
    assert advantages.tolist() == [[-0.5, -0.5, -0.5], [0.5, 0.0, 0.0]]
    white = whiten(advantages, mask, eps=0.0)
    deviation = ((3 * 0.25**2 + 0.75**2) / 3) ** 0.5
    assert float(white[0, 0]) == pytest.approx(-0.25 / deviation)
    assert float(white[1, 0]) == pytest.approx(0.75 / deviation)
    clamped = whiten(advantages, mask, ddof=0, floor="clamp", eps=1.0)
    assert float(clamped[1, 0]) == pytest.approx(0.75)
    by_sample = whiten(advantages, mask, weigh_by="samples", eps=0.0)
    assert float(by_sample[0, 0]) == pytest.approx(-(0.5**0.5))
    assert float(whiten(advantages, mask, mean_only=True)[1, 0]) == pytest.approx(0.75)


@pytest.mark.parametrize("weigh_by", ["tokens", "samples"])
def test_ranks_with_other_samples_agree_with_one(weigh_by, batch) -> None:
    whole = whiten(batch.arrays["advantages"], batch.mask, weigh_by=weigh_by)
    rows = [list(range(5)), list(range(5, 12))]
    calls: list[list[torch.Tensor]] = [[], []]
    for _ in range(4):  # each pass knows one more of the other's sums
        found = []
        for rank in range(2):
            other, seen = calls[1 - rank], []

            def reduce(x: torch.Tensor, seen=seen, other=other) -> torch.Tensor:
                seen.append(x)
                return x + other[len(seen) - 1] if len(other) >= len(seen) else x

            part = batch.rows(rows[rank])
            found.append(whiten(part.arrays["advantages"], part.mask, weigh_by=weigh_by, reduce=reduce))
            calls[rank] = seen
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-12, rtol=0)


def test_packed_equals_padded(batch) -> None:
    packed = batch.packed()
    flat = whiten(packed.arrays["advantages"], packed.mask, segment_ids=packed.segment_ids)
    torch.testing.assert_close(packed.unpack(flat, batch), whiten(batch.arrays["advantages"], batch.mask))


def test_refuses_not_finite() -> None:
    with pytest.raises(ValueError, match="values: nan in sample 0"):
        whiten(torch.full((1, 2), float("nan")), torch.ones(1, 2))
