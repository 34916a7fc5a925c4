"""Settings of the algorithm: estimator, losses, KL, entropy, correction, reward shaping and dynamic sampling.

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
from mrl.section import Section, known_name

_Estimators = Literal[
    "gae",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "grpo",
    "dr_grpo",
    "gdpo",
    "maxrl",
    "grpo_process",
    "rloo_process",
    "custom",
]
_Aggregations = Literal["token_mean", "sequence_mean", "constant"]
_KlKinds = Literal["k1", "abs", "k2", "k3"]

Estimator = Annotated[_Estimators, BeforeValidator(known_name("estimator", _Estimators))]
Aggregation = Annotated[_Aggregations, BeforeValidator(known_name("aggregation", _Aggregations))]
KlKind = Annotated[_KlKinds, BeforeValidator(known_name("KL kind", _KlKinds))]

WHITENS = frozenset({"gae", "reinforce_pp", "reinforce_pp_baseline", "rloo_process"})
"""Estimators whose papers whiten advantages over the tokens of the batch."""


RELATIVE = frozenset({"grpo", "dr_grpo", "gdpo", "maxrl", "rloo", "reinforce_pp_baseline", "rloo_process"})
"""Estimators that only compare samples of one prompt (grpo_process has several rewards per sample)."""


class EstimatorSection(Section):
    """Advantage estimator: turns rewards into advantages."""

    name: Estimator = "grpo"
    """Choose the advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount rewards by this factor per policy token (gae, reinforce_pp, grpo_process, rloo_process)."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Set GAE's lambda."""
    scale: Literal["group", "batch", "none"] | None = None
    """Divide centred rewards by the standard deviation of the group or batch, or by nothing; null keeps the
    estimator's own (grpo: group, rloo and dr_grpo: none)."""
    whiten: Literal["off", "tokens"] | None = None
    """Whiten advantages over the tokens of the batch; null follows the estimator's paper."""
    part_weights: dict[str, float] = {}
    """gdpo: normalise and weight each of these reward parts; empty takes the whole reward as one part."""
    function: str | None = Field(default=None, pattern=r"^.+:\w+$")
    """custom: call this package.module:function or file.py:function with mrl.algorithms.advantages.Rollouts
    and the options; it returns one advantage per sample or per token."""
    options: dict[str, float | int | bool | str] = {}
    """custom: pass these keyword arguments to the function."""

    @property
    def whitens(self) -> bool:
        """True if advantages are whitened over the tokens of the batch."""
        return self.name in WHITENS if self.whiten is None else self.whiten == "tokens"

    def faults(self) -> Iterator[str]:
        if self.part_weights and self.name != "gdpo":
            yield f"part_weights are only read by gdpo, not by {self.name}; remove them or choose gdpo"
        if (self.name == "custom") != (self.function is not None):
            yield (
                f"estimator.function = {self.function} with name = {self.name}: set a function with custom, "
                "and none with the others"
            )
        if self.options and self.name != "custom":
            yield f"estimator.options are only read by custom, not by {self.name}; remove them"
        if self.name == "maxrl" and self.scale is not None:
            yield f"estimator.scale = {self.scale}: maxrl divides by the group's mean; remove it"


class AggregationSection(Section):
    """Reduction of the per-token losses of one optimizer step to one number."""

    mode: Aggregation = "sequence_mean"
    """Average over all tokens of the minibatch (token_mean), over sequences of token means (sequence_mean),
    or divide by a constant (Dr. GRPO)."""
    length: int | None = Field(default=None, ge=1)
    """constant: divide the sum over tokens by the number of sequences times this length."""

    def faults(self) -> Iterator[str]:
        if (self.mode == "constant") != (self.length is not None):
            yield (
                f"aggregation.length = {self.length} with mode = {self.mode}: set a length with constant "
                "(Dr. GRPO takes rollout.max_response_tokens), and none with the other modes"
            )


class KlSection(Section):
    """KL to the reference policy."""

    location: Literal["off", "reward", "loss"] = "off"
    """Subtract the KL from each token's reward, add it to the loss, or neither."""
    kind: KlKind = "k3"
    """Choose the estimator of the KL per token."""
    coefficient: float = Field(default=0.0, ge=0)
    """Weight the KL by this."""
    unbiased: bool = False
    """In the loss, multiply by the policy ratio, which makes the gradient unbiased (DeepSeek-V3.2)."""

    def faults(self) -> Iterator[str]:
        if self.location == "off" and self.coefficient > 0:
            yield (
                f"kl.coefficient = {self.coefficient} with kl.location = off; set kl.location to reward or "
                "loss"
            )
        if self.location != "off" and self.coefficient == 0:
            yield f"kl.location = {self.location} needs kl.coefficient above 0"
        if self.unbiased and self.location != "loss":
            yield f"kl.unbiased needs kl.location = loss, not {self.location}"
        if self.location == "loss" and self.kind == "k1" and not self.unbiased:
            yield (
                "kl.kind = k1 with kl.location = loss has no effect on average: its gradient is that of the "
                "log-prob, whose mean over the policy's own samples is 0; set kl.kind: k2 (the gradient of "
                "the KL) or k3, kl.unbiased: true, or kl.location: reward"
            )


class EntropySection(Section):
    """Entropy bonus; entropies are those of the distribution at the sampling temperature."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight the bonus by this (start value if a target is given)."""
    target: float | None = Field(default=None, gt=0)
    """Apply and raise the bonus below this mean entropy (nats); null keeps the coefficient fixed."""


class AlgorithmSection(Section):
    """Estimator, losses and their constants."""

    estimator: EstimatorSection = EstimatorSection()
    """Turn rewards into advantages."""
    loss: PolicyLoss = PpoClipLoss()
    """Choose the policy loss."""
    aggregation: AggregationSection = AggregationSection()
    """Reduce per-token losses to one number."""
    kl: KlSection = KlSection()
    """Penalise the KL to the reference policy."""
    entropy: EntropySection = EntropySection()
    """Add an entropy bonus."""
    distillation: DistillationSection | None = None
    """Learn from teachers, with rewards or alone; null has no teachers."""
    old_logprobs: Literal["auto", "recomputed", "rollout", "decoupled"] = "auto"
    """Take the importance ratio against the trainer's log-probs, and the engine's for tokens of earlier
    versions, with a separate pass only if needed (auto) or always (recomputed); against the engine's
    (rollout); or against the trainer's for every token, while `correction` weights tokens of earlier versions
    (decoupled PPO, arXiv 2110.00641)."""
    correction: Correction = NoCorrection()
    """Correct the mismatch between trainer and engine by weights exp(old - engine log-prob)."""
    shaping: ShapingSection = ShapingSection()
    """Shape the rewards of every domain that has no entry of its own."""
    shaping_by_domain: dict[str, ShapingSection] = {}
    """Shape rewards by domain; an entry replaces `shaping` as a whole."""
    filter: FilterSection | None = None
    """Filter groups by dynamic sampling; null trains on every group."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """gae: clip new values to this distance from the old ones in the critic loss; null: no clipping."""
    epochs: int = Field(default=1, ge=1)
    """Train this many passes over a step's samples."""
    minibatches: int = Field(default=1, ge=1)
    """Make this many optimizer steps per pass (whole groups stay together)."""

    def shapings(self) -> dict[str, ShapingSection]:
        """Return every reward shaping by the path of its setting."""
        of_domains = {
            f"shaping_by_domain.{name}": shaping for name, shaping in self.shaping_by_domain.items()
        }
        return {"shaping": self.shaping} | of_domains

    @property
    def needs_reference(self) -> bool:
        """True if reference log-probs are read."""
        return self.kl.location != "off"

    @property
    def num_teachers(self) -> int:
        """Number of teacher models."""
        return 0 if self.distillation is None else len(self.distillation.folders)

    @property
    def recomputes_policy(self) -> bool:
        """True if the policy's log-probs need a pass before the updates.

        With one update per step, that update's own log-probs are the old ones, and the engine is compared
        with them.
        """
        has_one_update = self.epochs * self.minibatches == 1
        return self.old_logprobs == "recomputed" or not has_one_update or self.kl.location == "reward"

    @property
    def reference_in_update(self) -> bool:
        """True if the reference's pass runs in the only update's call, not before it."""
        return self.needs_reference and not self.recomputes_policy

    @property
    def ignores_staleness(self) -> bool:
        """True if the loss treats tokens of earlier versions like those of the newest."""
        return self.loss.name == "reinforce" and self.old_logprobs != "decoupled"

    @property
    def needs_values(self) -> bool:
        """True if a critic is trained."""
        return self.estimator.name == "gae"

    def faults(self) -> Iterator[str]:
        kind = self.correction.kind
        if self.old_logprobs == "rollout" and kind not in ("off", "off_policy_mask"):
            yield (
                f"correction.kind = {kind} with old_logprobs = rollout: the ratio already contains the "
                "mismatch with the engine; set correction.kind = off or old_logprobs = auto"
            )
        if self.old_logprobs == "decoupled" and kind in ("off", "off_policy_mask"):
            yield (
                f"old_logprobs = decoupled with correction.kind = {kind} would train tokens of earlier "
                "versions as if the newest had sampled them; set a correction.kind (truncated), or "
                "old_logprobs = auto"
            )
        alone = self.distillation is not None and self.distillation.teachers_only
        if alone and self.filter is not None:
            yield (
                "distillation.teachers_only = true with algorithm.filter: rewards would decide which groups "
                "the teachers see; remove the filter, or teachers_only"
            )
        if alone and self.estimator.name == "gae":
            yield (
                "distillation.teachers_only = true with estimator.name = gae: nothing would read the "
                "critic's values; choose grpo, or remove teachers_only"
            )
        if self.estimator.name == "gdpo" and self.kl.location == "reward":
            yield (
                "gdpo normalises reward parts separately and cannot use kl.location = reward; set "
                "kl.location = loss"
            )
        if self.estimator.name == "maxrl" and self.kl.location == "reward":
            yield (
                "maxrl divides by the mean reward, which a KL on every token would make negative; set "
                "kl.location = loss"
            )
        if self.estimator.name in ("grpo_process", "rloo_process") and self.kl.location == "reward":
            yield (
                f"{self.estimator.name} normalises process rewards, which a KL on every token would change; "
                "set kl.location = loss"
            )
