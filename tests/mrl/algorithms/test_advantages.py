"""Every estimator against golden numbers, loops over single samples, and changes that must not matter."""

import statistics

import pytest
import torch
from torch import Tensor

from mrl.algorithms import advantages as formulas
from mrl.algorithms.advantages import ESTIMATORS
from tests.mrl.algorithms.padded import estimate, whiten


def outcome(name: str, rewards: Tensor, **options) -> Tensor:
    """Return advantages [P, G] of outcome rewards [P, G]; one token per sample."""
    flat = rewards.reshape(-1, 1)
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    advantages, _ = estimate(
        name,
        token_rewards=flat,
        loss_mask=torch.ones_like(flat, dtype=torch.bool),
        group_ids=groups,
        **options,
    )
    return advantages.reshape(rewards.shape)


def set_constants(monkeypatch: pytest.MonkeyPatch, *, ddof: int = 1, eps: float = 1e-6) -> None:
    """Divide by another standard deviation than ours."""
    monkeypatch.setattr(formulas, "DDOF", ddof)
    monkeypatch.setattr(formulas, "EPS", eps)


@pytest.mark.parametrize(
    ("variant", "ddof", "eps"),
    [
        ("openrlhf_group_norm(ddof1,eps1e-9)", 1, 1e-9),
        ("roll_grpo_or_verl_grpo(ddof1,eps1e-6)", 1, 1e-6),
        ("trl_grpo(ddof1,eps1e-4)", 1, 1e-4),
        ("trl_async_grpo(ddof0,eps1e-8)", 0, 1e-8),
    ],
)
def test_group_norm(golden, variant, ddof, eps, monkeypatch) -> None:
    case = golden("A01")
    set_constants(monkeypatch, ddof=ddof, eps=eps)
    case.check(outcome("grpo", case.tensor(case.inputs["rewards"])), case.expected[variant])


def test_group_norm_by_default_is_ddof_1_and_eps_1e_6(golden) -> None:
    case = golden("A01")
    advantages = outcome("grpo", case.tensor(case.inputs["rewards"]))
    case.check(advantages, case.expected["roll_grpo_or_verl_grpo(ddof1,eps1e-6)"])


def test_degenerate_group_in_float32_is_exactly_zero() -> None:
    rewards = torch.full((1, 3), 0.9, dtype=torch.float32)
    rewards[0, 1] = torch.nextafter(rewards[0, 1], torch.tensor(2.0))
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gdpo"):
        assert torch.equal(outcome(name, rewards), torch.zeros(1, 3)), name


def test_rloo(golden) -> None:
    case = golden("A03")
    advantages = outcome("rloo", case.tensor(case.inputs["rewards"]))
    case.check(advantages, case.expected["openrlhf_rloo=trl_rloo=verl_rloo"])


def test_rloo_leaves_out_samples_without_a_verdict(golden) -> None:
    case = golden("A03")
    rewards = torch.tensor(
        [[float("nan") if r is None else r for r in row] for row in case.inputs["rewards_with_nan"]],
        dtype=case.dtype,
    )
    advantages = outcome("rloo", rewards, has_reward=~rewards.isnan().reshape(-1))
    case.check(advantages, case.expected["trl_rloo_nan_aware"])


@pytest.mark.parametrize(
    ("variant", "scale"),
    [("group", "group"), ("batch(std of all rewards, ddof1)", "batch"), ("none", "none")],
)
def test_scale(golden, variant, scale, monkeypatch) -> None:
    case = golden("A05")
    set_constants(monkeypatch, eps=1e-4)
    advantages = outcome("grpo", case.tensor(case.inputs["rewards"]), scale=scale)
    case.check(advantages, case.expected[variant])
    if scale == "none":
        case.check(outcome("dr_grpo", case.tensor(case.inputs["rewards"])), case.expected[variant])


def test_gdpo_normalises_each_part(golden, monkeypatch) -> None:
    case = golden("A06")
    set_constants(monkeypatch, eps=1e-4)
    parts = case.tensor(case.inputs["rewards_per_func[group][sample][func]"]).reshape(8, 2)
    total = case.tensor([[0.0] * 4] * 2)
    weights = case.tensor(case.inputs["weights"])
    advantages = outcome("gdpo", total, reward_parts=parts, part_weights=weights.tolist())
    case.check(advantages, case.expected["normalize_then_sum"])
    summed = (parts * weights).sum(1).reshape(2, 4)
    case.check(outcome("grpo", summed), case.expected["sum_then_normalize"])


def test_return_over_a_gap(golden) -> None:
    case = golden("B01")
    mask = case.tensor(case.inputs["mask"])
    rewards = -case.params["kl_coef"] * case.tensor(case.inputs["kl"])
    rewards[0, 5] += case.inputs["score"]
    case.check(rewards * mask, case.expected["token_rewards"])
    advantages, returns = estimate(
        "reinforce_pp",
        token_rewards=rewards,
        loss_mask=mask,
        group_ids=torch.tensor([0]),
        gamma=case.params["gamma"],
    )
    case.check(
        advantages, case.expected["discount counts policy tokens only (verl REINFORCE++ today; compact)"]
    )
    assert torch.equal(advantages, returns)


def test_gae_skips_tokens_of_the_environment(golden) -> None:
    case = golden("B03")
    advantages, returns = estimate(
        "gae",
        token_rewards=case.tensor(case.inputs["rewards"]),
        values=case.tensor(case.inputs["values"]),
        loss_mask=case.tensor(case.inputs["mask"]),
        group_ids=torch.tensor([0]),
        gamma=case.params["gamma"],
        lam=case.params["lambda"],
    )
    expected = case.expected["compact (delete non-policy tokens, run plain GAE, scatter back)"]
    case.check(advantages, expected["advantages"])
    case.check(returns, expected["returns"])


def ragged(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Return padded [B, T] float64 values (padding 99) and their mask."""
    longest = max(map(len, rows))
    values = torch.tensor([row + [99.0] * (longest - len(row)) for row in rows], dtype=torch.float64)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], dtype=torch.bool)
    return values, mask


SEED_EXAMPLE = [[0.1, 0.2, 0.3], [0.4, 0.5], [0.2, 0.1, 0.2, 0.1], [0.3, 0.4, 0.3]]


@pytest.mark.parametrize("ddof", [0, 1])
def test_process_grpo_pools_all_tokens(ddof, monkeypatch) -> None:
    """The worked example: pooled mean 0.258, standard deviation .12555433 (ddof 0) or .13113722 (ddof 1)."""
    values, mask = ragged(SEED_EXAMPLE)
    set_constants(monkeypatch, ddof=ddof, eps=0.0)
    advantages, _ = estimate(
        "grpo_process", token_rewards=values, loss_mask=mask, group_ids=torch.zeros(4, dtype=torch.int64)
    )
    mean, deviation = 0.25833333333333336, {0: 0.12555432644432805, 1: 0.13113721705515073}[ddof]
    pooled = [x for row in SEED_EXAMPLE for x in row]
    assert statistics.mean(pooled) == pytest.approx(mean)
    for row, rewards in enumerate(SEED_EXAMPLE):
        for t in range(len(rewards)):
            wanted = sum((r - mean) / deviation for r in rewards[t:])
            assert float(advantages[row, t]) == pytest.approx(wanted, abs=1e-9)
    assert torch.equal(advantages[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))


def test_process_grpo_can_pool_step_ends_only(monkeypatch) -> None:
    set_constants(monkeypatch, ddof=0, eps=0.0)
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    ends = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1]], dtype=torch.bool)
    advantages, _ = estimate(
        "grpo_process",
        token_rewards=rewards,
        loss_mask=torch.ones_like(ends),
        reward_mask=ends,
        group_ids=torch.tensor([1, 1]),
    )
    assert advantages.tolist() == [[0.0, 0.0, -1.0, -1.0], [0.0, 0.0, 1.0, 1.0]]


def test_prime_rloo(golden) -> None:
    case = golden("G02")
    values, mask = ragged(case.inputs["token_rewards"])
    values = values.to(case.dtype)
    arguments = {"loss_mask": mask, "group_ids": torch.zeros(4, dtype=torch.int64)}
    process, _ = estimate("rloo_process", token_rewards=values, **arguments)
    both, _ = estimate(
        "rloo_process", token_rewards=values, outcomes=case.tensor(case.inputs["outcome"]), **arguments
    )
    for row in range(4):
        case.check(process[row, mask[row]], case.expected["suffix_sum_process_only"][row])
        case.check(5 * both[row, mask[row]], case.expected["combined_returns(coef 5 and 5)"][row])
    means = [statistics.mean(row) for row in case.inputs["token_rewards"]]
    assert sum(means) / 3 == pytest.approx(case.expected["baseline = sum of means/(n-1)"], abs=1e-9)


def run(name: str, batch) -> tuple[Tensor, Tensor]:
    rewards = batch.arrays["token_rewards"]
    return estimate(
        name,
        token_rewards=rewards.abs() if name == "maxrl" else rewards,
        values=batch.arrays["values"],
        loss_mask=batch.mask,
        group_ids=batch.group_ids,
        segment_ids=batch.segment_ids,
        gamma=0.9,
        lam=0.8,
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sample_order_does_not_matter(name, batch) -> None:
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6]
    for straight, turned in zip(run(name, batch), run(name, batch.rows(order)), strict=True):
        torch.testing.assert_close(turned, straight[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_of_the_environment_may_hold_anything(name, batch) -> None:
    wild = {n: v.masked_fill(~batch.mask, float("nan")) for n, v in batch.arrays.items()}
    changed = type(batch)(wild, batch.mask, batch.group_ids)
    for before, after in zip(run(name, batch), run(name, changed), strict=True):
        assert torch.equal(before, after)
        assert not bool(after[~batch.mask].any())


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("gae", "reinforce_pp")])
def test_equal_rewards_and_lone_samples_give_exactly_zero(name, batch) -> None:
    constant = torch.full_like(batch.arrays["token_rewards"], 0.0)
    for row in range(12):
        if name in ("grpo_process", "rloo_process"):
            constant[row] = 0.1
        elif batch.mask[row].any():
            constant[row, int(batch.mask[row].nonzero().max())] = 0.7
    advantages, _ = estimate(name, token_rewards=constant, loss_mask=batch.mask, group_ids=batch.group_ids)
    assert torch.equal(advantages, torch.zeros_like(advantages))


def test_whitening_of_a_short_mask(golden) -> None:
    case = golden("I01")
    values, mask = case.tensor(case.inputs["values"]), case.tensor(case.inputs["mask"])
    case.check(whiten(values, mask), case.expected["whiten once"])
    case.check(whiten(values, mask, ddof=0, eps=0.0), case.expected["ddof0"])
    assert torch.equal(whiten(values, case.tensor([[0, 1, 0]])), values * case.tensor([[0, 1, 0]]))


def test_whitening_of_prime(golden) -> None:
    case = golden("G02")
    rows = case.expected["combined_returns(coef 5 and 5)"]
    flat = case.tensor([x for row in rows for x in row])
    whitened = whiten(flat, torch.ones_like(flat))
    case.check(whitened, [x for row in case.expected["whitened(ddof1)"] for x in row])


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


class TestBadInput:
    """Refusals name the argument, and the sample at fault."""

    arguments = {
        "token_rewards": torch.zeros(2, 3),
        "loss_mask": torch.ones(2, 3, dtype=torch.bool),
        "group_ids": torch.tensor([0, 0]),
    }

    def refused(self, match: str, error: type[Exception] = ValueError, name: str = "grpo", **changed) -> None:
        with pytest.raises(error, match=match):
            estimate(name, **(self.arguments | changed))

    def test_unknown_name(self) -> None:
        self.refused("did you mean 'grpo'.*known: .*dr_grpo.*rloo_process", name="grop")

    def test_shapes(self) -> None:
        self.refused("token_rewards: shape", token_rewards=torch.zeros(2, 4))
        self.refused("group_ids: shape", group_ids=torch.tensor([0, 0, 1]))
        self.refused("reward_parts: shape", name="gdpo", reward_parts=torch.zeros(3, 2))

    def test_dtypes(self) -> None:
        self.refused(
            "token_rewards: dtype torch.int64", TypeError, token_rewards=torch.zeros(2, 3, dtype=torch.int64)
        )
        self.refused(
            "token_rewards: dtype torch.bfloat16", TypeError, token_rewards=torch.zeros(2, 3).bfloat16()
        )

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, value) -> None:
        rewards = torch.zeros(2, 3)
        rewards[1, 2] = value
        self.refused(f"token_rewards: {value} in sample 1", token_rewards=rewards)

    def test_missing_values(self) -> None:
        self.refused("values: required by the estimator 'gae'", name="gae")

    def test_empty_mask_gives_zero(self) -> None:
        empty = self.arguments | {"loss_mask": torch.zeros(2, 3)}
        for name in ESTIMATORS:
            advantages, _ = estimate(name, values=torch.ones(2, 3), **empty)
            assert not bool(advantages.any()), name
