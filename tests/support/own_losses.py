"""User losses and estimators with typing mistakes."""

from torch import Tensor

from mrl.algorithms.advantages import Rollouts
from mrl.algorithms.losses import PerToken, Tokens
from mrl.algorithms.preference import Side
from mrl.config.sections.tune import ObjectiveSection


def misspelt(tokens: Tokens) -> PerToken:
    return tokens.ratioo()  # type: ignore[attr-defined]


def groups_only(rollouts: Rollouts) -> Tensor:
    return rollouts.groups.total(rollouts.scores())  # one value per group, not per sample


def misspelt_of_pairs(section: ObjectiveSection, chosen: Side, rejected: Side) -> Tensor:
    return rejected.logprobs - chosen.logprobs  # type: ignore[attr-defined]
