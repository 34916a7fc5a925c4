"""Reward shaping: functions from rewards [B] and facts about the samples to rewards [B].

Owns the formulas; which apply, to which domain and in which order, is the recipe's. Lengths are counts of policy tokens
(the mask's sum), never spans that include the environment's tokens. Rewards must be finite: samples without a reward are taken
out before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms import checks
from mrl.algorithms.groups import Groups
from mrl.algorithms.running import RunningMoments

_SETS = ("none", "batch", "group", "running")


def overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0, capped: bool = True
) -> Tensor:
    """[B] numbers <= 0 to add: 0 up to max_tokens - buffer_tokens, then linearly to -factor at max_tokens.

    DAPO (arXiv 2503.14476, eq. 13). `capped=False` keeps growing beyond max_tokens (verl). Lengths in policy tokens.
    Worked example: max 100, buffer 20, lengths 80, 90, 120 give 0, -0.5, -1.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens = {buffer_tokens}: must be between 1 and max_tokens = {max_tokens}")
    share = (lengths.to(torch.float64) - (max_tokens - buffer_tokens)) / buffer_tokens
    return -factor * share.clamp(min=0.0, max=1.0 if capped else None)


def stop_properly(
    rewards: Tensor, truncated: Tensor, *, coefficient: float, scale_negative: bool = False
) -> Tensor:
    """[B] rewards with truncated samples punished (ProRL): in [0, 1] multiplies, below 0 replaces the reward.

    Deviation: only positive rewards are multiplied, because a factor below 1 would make a truncated wrong answer better
    than a finished one; `scale_negative=True` multiplies all (OpenRLHF).
    """
    _check(rewards, truncated=truncated)
    if coefficient > 1:
        raise ValueError(f"coefficient = {coefficient}: must be at most 1")
    if coefficient < 0:
        return torch.where(truncated, rewards.new_tensor(coefficient), rewards)
    touched = truncated if scale_negative else truncated & (rewards > 0)
    return torch.where(touched, rewards * coefficient, rewards)


def missing_eos_penalty(rewards: Tensor, finished: Tensor, *, penalty: float) -> Tensor:
    """[B] rewards minus `penalty` where the policy did not produce the end-of-text token."""
    _check(rewards, finished=finished)
    return rewards - penalty * (~finished).to(rewards.dtype)


def clip(rewards: Tensor, *, low: float | None = None, high: float | None = None) -> tuple[Tensor, Tensor]:
    """([B] rewards within [low, high], [B] bool which were changed). On raw rewards, before anything else."""
    _check(rewards)
    if low is None and high is None:
        return rewards, torch.zeros_like(rewards, dtype=torch.bool)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"low = {low} must be below high = {high}")
    clipped = rewards.clamp(min=low, max=high)
    return clipped, clipped != rewards


def per_length(rewards: Tensor, lengths: Tensor, *, reference: float) -> Tensor:
    """[B] rewards * reference / length, lengths in policy tokens; a sample without tokens keeps its reward."""
    _check(rewards, lengths=lengths)
    checks.positive("reference", reference)
    scaled = rewards * reference / lengths.clamp(min=1).to(rewards.dtype)
    return torch.where(lengths > 0, scaled, rewards)


def normalise(
    rewards: Tensor,
    *,
    mean: str = "none",
    std: str = "none",
    group_ids: Tensor | None = None,
    running: RunningMoments | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """[B] (rewards - mean) / (std + eps), each over "batch", "group", "running" or "none" (0 and 1).

    `running` moments must already hold these rewards. `group_ids` [B] are needed by "group". All combinations give
    [B]. Where the standard deviation is undefined or 0 the division is left out.
    """
    _check(rewards)
    checks.known(mean, _SETS, "mean")
    checks.known(std, _SETS, "std")
    numbers = rewards.to(torch.float64)
    centres, deviations = _moments(numbers, {mean, std}, group_ids, running, ddof)
    shifted = numbers - centres[mean] if mean != "none" else numbers
    if std == "none":
        return shifted.to(rewards.dtype)
    deviation = torch.as_tensor(deviations[std], dtype=torch.float64, device=rewards.device)
    divisor = torch.where(deviation > 0, deviation + eps, torch.ones_like(deviation))
    return (shifted / divisor).to(rewards.dtype)


def _moments(
    rewards: Tensor, wanted: set[str], group_ids: Tensor | None, running: RunningMoments | None, ddof: int
) -> tuple[dict[str, Tensor | float], dict[str, Tensor | float]]:
    centres: dict[str, Tensor | float] = {}
    deviations: dict[str, Tensor | float] = {}
    if "batch" in wanted:
        centres["batch"] = rewards.mean() if len(rewards) else 0.0
        deviations["batch"] = rewards.std(correction=ddof) if len(rewards) > ddof else 0.0
    if "group" in wanted:
        if group_ids is None or group_ids.shape != rewards.shape:
            raise ValueError("group_ids: [B] ids are needed to normalise by group")
        groups = Groups.of(group_ids, torch.ones_like(rewards, dtype=torch.bool))
        centres["group"], deviation = groups.mean(rewards), groups.std(rewards, ddof)
        deviations["group"] = deviation.masked_fill(groups.degenerate(rewards, 1e-6), 0.0)
    if "running" in wanted:
        if running is None:
            raise ValueError("running: moments are needed to normalise by running statistics")
        centres["running"], deviations["running"] = running.mean, running.std(ddof)
    return centres, deviations


def _check(rewards: Tensor, **others: Tensor) -> None:
    checks.per_sample("rewards", rewards, rewards.numel())
    for name, values in others.items():
        checks.per_sample(name, values, len(rewards), floating=False)
        if name in ("truncated", "finished") and values.dtype != torch.bool:
            raise TypeError(f"{name}: dtype {values.dtype}, expected bool")
