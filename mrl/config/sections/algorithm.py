"""What is optimised: estimator, losses, KL, entropy, correction, reward shaping and dynamic sampling.

An algorithm is a choice of named blocks; a new combination needs no code. The defaults are plain GRPO as in
DeepSeekMath (arXiv 2402.03300) with the KL term off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mrl.config.sections.correction import Correction, NoCorrection
from mrl.config.sections.distillation import DistillationSection
from mrl.config.sections.policy_loss import PolicyLoss, PpoClipLoss
from mrl.config.sections.shaping import FilterSection, ShapingSection
from mrl.section import Section, named

_Estimators = Literal[
    "gae",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "grpo",
    "dr_grpo",
    "gdpo",
    "grpo_process",
    "rloo_process",
]
_Aggregations = Literal["token_mean", "sequence_mean", "constant"]
_KlKinds = Literal["k1", "abs", "k2", "k3"]

Estimator = Annotated[_Estimators, BeforeValidator(named("estimator", _Estimators))]
Aggregation = Annotated[_Aggregations, BeforeValidator(named("aggregation", _Aggregations))]
KlKind = Annotated[_KlKinds, BeforeValidator(named("KL kind", _KlKinds))]

WHITENS = frozenset({"gae", "reinforce_pp", "reinforce_pp_baseline", "rloo_process"})
"""Estimators whose papers whiten advantages over the tokens of the batch."""


RELATIVE = frozenset({"grpo", "dr_grpo", "gdpo", "rloo", "reinforce_pp_baseline", "rloo_process"})
"""Estimators that compare a sample with the others of its prompt alone; grpo_process has several rewards in one sample."""


class EstimatorSection(Section):
    """How rewards become advantages."""

    name: Estimator = "grpo"
    """Advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per policy token (gae, reinforce_pp, grpo_process, rloo_process)."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    scale: Literal["group", "batch", "none"] | None = None
    """What centred rewards are divided by; null means the estimator's own (grpo: group, rloo and dr_grpo:
    none)."""
    whiten: Literal["off", "tokens"] | None = None
    """Whitening of advantages over the tokens of the batch; null means as the estimator's paper."""
    part_weights: dict[str, float] = {}
    """gdpo: the reward parts normalised on their own, with weights; empty means the whole reward as the only
    part."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the tokens of the batch."""
        return self.name in WHITENS if self.whiten is None else self.whiten == "tokens"

    def faults(self) -> Iterator[str]:
        if self.part_weights and self.name != "gdpo":
            yield f"part_weights are read by gdpo only, not by {self.name}; remove them or choose gdpo"


class AggregationSection(Section):
    """How per-token losses of one optimizer step become one number."""

    mode: Aggregation = "sequence_mean"
    """token_mean: over all tokens of the step; sequence_mean: mean over sequences of token means; constant:
    Dr. GRPO."""
    length: int | None = Field(default=None, ge=1)
    """constant: sums over tokens are divided by sequences times this length."""

    def faults(self) -> Iterator[str]:
        if (self.mode == "constant") != (self.length is not None):
            yield (
                f"aggregation.length = {self.length} with mode = {self.mode}: constant needs a length (Dr. GRPO "
                "takes rollout.max_response_tokens), the other modes take none"
            )


class KlSection(Section):
    """Distance to the reference policy."""

    location: Literal["off", "reward", "loss"] = "off"
    """Subtracted from each token's reward, added to the loss, or neither."""
    kind: KlKind = "k3"
    """Estimator of the KL per token."""
    coefficient: float = Field(default=0.0, ge=0)
    """Weight."""
    unbiased: bool = False
    """In the loss: multiply by the policy ratio, which makes the gradient unbiased (DeepSeek-V3.2)."""

    def faults(self) -> Iterator[str]:
        if self.location == "off" and self.coefficient > 0:
            yield f"kl.coefficient = {self.coefficient} with kl.location = off; choose reward or loss"
        if self.location != "off" and self.coefficient == 0:
            yield f"kl.location = {self.location} needs kl.coefficient above 0"
        if self.unbiased and self.location != "loss":
            yield f"kl.unbiased is for kl.location = loss, not {self.location}"
        if self.location == "loss" and self.kind == "k1" and not self.unbiased:
            yield (
                "kl.kind = k1 with kl.location = loss has no effect on average: its gradient is that of the "
                "log-prob, whose mean over the policy's own samples is 0; write kl.kind: k2 (the gradient of the "
                "KL) or k3, kl.unbiased: true, or kl.location: reward"
            )


class EntropySection(Section):
    """Entropy bonus; entropies are of the distribution at the sampling temperature."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the bonus (start value where a target is given)."""
    target: float | None = Field(default=None, gt=0)
    """Mean entropy in nats below which the bonus acts and grows; null keeps the coefficient fixed."""


class AlgorithmSection(Section):
    """Estimator, losses and their constants."""

    estimator: EstimatorSection = EstimatorSection()
    """Rewards to advantages."""
    loss: PolicyLoss = PpoClipLoss()
    """Policy loss."""
    aggregation: AggregationSection = AggregationSection()
    """Tokens to one number."""
    kl: KlSection = KlSection()
    """KL to the reference policy."""
    entropy: EntropySection = EntropySection()
    """Entropy bonus."""
    distillation: DistillationSection | None = None
    """Teachers to learn from, beside rewards or alone; null has none."""
    old_logprobs: Literal["auto", "recomputed", "rollout", "decoupled"] = "auto"
    """What the ratio is taken against. auto: the trainer's log-probs, by a pass of their own only where one is needed, and the
    engine's for tokens of earlier versions; recomputed: the same, always by a pass; rollout: the engine's; decoupled: the
    trainer's for every token, while `correction` weighs tokens of earlier versions (decoupled PPO, arXiv 2110.00641)."""
    correction: Correction = NoCorrection()
    """Weights exp(old - engine log-prob) against the difference between trainer and engine."""
    shaping: ShapingSection = ShapingSection()
    """Reward shaping of every domain without an entry of its own."""
    shaping_by_domain: dict[str, ShapingSection] = {}
    """Reward shaping by domain; an entry replaces `shaping` as a whole."""
    filter: FilterSection | None = None
    """Dynamic sampling; null trains on every group."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Critic loss of gae: new values count as at most this far from the old ones; null means plain squared error."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's samples."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps of each pass (whole groups stay together)."""

    def shapings(self) -> dict[str, ShapingSection]:
        """Every shaping of rewards, by the path of its setting."""
        of_domains = {f"shaping_by_domain.{name}": each for name, each in self.shaping_by_domain.items()}
        return {"shaping": self.shaping} | of_domains

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are read."""
        return self.kl.location != "off"

    @property
    def num_teachers(self) -> int:
        """Models whose log-probs are learned from."""
        return 0 if self.distillation is None else len(self.distillation.folders)

    @property
    def recomputes_policy(self) -> bool:
        """Whether the policy's log-probs need a pass before the updates.

        With one update a step its own are the old ones, and the engine is measured in it.
        """
        one = self.epochs * self.minibatches == 1
        return self.old_logprobs == "recomputed" or not one or self.kl.location == "reward"

    @property
    def reference_in_update(self) -> bool:
        """Whether the reference's pass lies in the only update's call; else it is beside, or after, the one for old log-probs."""
        return self.needs_reference and not self.recomputes_policy

    @property
    def ignores_age(self) -> bool:
        """Whether nothing in the loss tells a token of an earlier version from one of today's."""
        return self.loss.name == "reinforce" and self.old_logprobs != "decoupled"

    @property
    def needs_values(self) -> bool:
        """Whether a critic is trained."""
        return self.estimator.name == "gae"

    def faults(self) -> Iterator[str]:
        kind = self.correction.kind
        if self.old_logprobs == "rollout" and kind != "off":
            yield (
                f"correction.kind = {kind} with old_logprobs = rollout: the ratio already holds the difference "
                "to the engine; choose correction off, or old_logprobs auto"
            )
        if self.old_logprobs == "decoupled" and kind == "off":
            yield (
                "old_logprobs = decoupled with correction.kind = off: nothing would weigh tokens of earlier versions, which "
                "would be trained as if the newest had sampled them; choose a correction (truncated), or old_logprobs auto"
            )
        alone = self.distillation is not None and self.distillation.alone
        if alone and self.filter is not None:
            yield (
                "distillation.alone = true with algorithm.filter: rewards would decide which groups the teachers see; remove the "
                "filter, or alone"
            )
        if alone and self.estimator.name == "gae":
            yield (
                "distillation.alone = true with estimator.name = gae: nothing would read the critic's values; choose grpo, or "
                "remove alone"
            )
        if self.estimator.name == "gdpo" and self.kl.location == "reward":
            yield (
                "gdpo normalises reward parts on their own and has no use for kl.location = reward; use loss"
            )
        if self.estimator.name in ("grpo_process", "rloo_process") and self.kl.location == "reward":
            yield (
                f"{self.estimator.name} normalises process rewards, which a KL on every token would change; "
                "use kl.location = loss"
            )
