"""What is optimised: estimator, losses, KL, entropy, correction, reward shaping and dynamic sampling.

An algorithm is a choice of named blocks; a new combination needs no code. The defaults are plain GRPO as in
DeepSeekMath (arXiv 2402.03300) with the KL term off.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from mrl.config.section import Section


def _named(what: str, literal: Any) -> Callable[[Any], Any]:
    """A validator whose error lists the known names with the nearest first."""
    names = [str(name) for name in get_args(literal)]

    def check(value: Any) -> Any:
        if value is None or value in names or not isinstance(value, str):
            return value
        close = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(f"unknown {what} '{value}': {hint}known: {', '.join(names)}")

    return check


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
_Corrections = Literal["off", "truncated", "icepop", "sequence_mask", "geometric", "product"]
_Losses = Literal["ppo_clip", "dual_clip", "gspo", "cispo", "topr", "reinforce", "kimi15", "custom"]

Estimator = Annotated[_Estimators, BeforeValidator(_named("estimator", _Estimators))]
Aggregation = Annotated[_Aggregations, BeforeValidator(_named("aggregation", _Aggregations))]
KlKind = Annotated[_KlKinds, BeforeValidator(_named("KL kind", _KlKinds))]
CorrectionKind = Annotated[_Corrections, BeforeValidator(_named("correction", _Corrections))]

WHITENS = frozenset({"gae", "reinforce_pp", "reinforce_pp_baseline", "rloo_process"})
"""Estimators whose papers whiten advantages over the tokens of the batch."""


class EstimatorSection(Section):
    """How rewards become advantages."""

    name: Estimator = "grpo"
    """Advantage estimator."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per policy token (gae, reinforce_pp, grpo_process, rloo_process)."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    discount: Literal["policy_tokens", "all_tokens"] = "policy_tokens"
    """reinforce_pp: whether tokens the policy did not produce discount too."""
    scale: Literal["group", "batch", "none", "leave_one_out"] | None = None
    """What centred rewards are divided by; None means the estimator's own (grpo: group, rloo and dr_grpo: none)."""
    ddof: Literal[0, 1] = 1
    """Delta degrees of freedom of every standard deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to a standard deviation before dividing by it."""
    tolerance: float = Field(default=1e-6, ge=0)
    """A group whose rewards differ by no more than this share of the largest is degenerate: advantage exactly 0."""
    whiten: Literal["off", "tokens", "samples"] | None = None
    """Whitening of advantages over the batch, weighted by token or sample; None means as the estimator's paper."""
    whiten_per_domain: bool = False
    """Whiten inside each domain instead of over the batch."""
    clip: float | None = Field(default=None, gt=0)
    """Largest absolute advantage; None means no clipping."""
    part_weights: dict[str, float] = Field(default_factory=dict)
    """gdpo: the reward parts normalised on their own, with weights; empty means the whole reward as the only part."""
    process_coefficient: float = Field(default=1.0, ge=0)
    """rloo_process: weight of the token rewards."""
    outcome_coefficient: float = Field(default=1.0, ge=0)
    """rloo_process: weight of the outcome reward."""

    @property
    def whitening(self) -> Literal["off", "tokens", "samples"]:
        return self.whiten or ("tokens" if self.name in WHITENS else "off")

    @model_validator(mode="after")
    def _parts_have_a_reader(self) -> EstimatorSection:
        if self.part_weights and self.name != "gdpo":
            raise ValueError(
                f"part_weights are read by gdpo only, not by {self.name}; remove them or choose gdpo"
            )
        if self.scale == "leave_one_out" and self.name != "rloo":
            raise ValueError(
                f"scale = leave_one_out is for rloo, not for {self.name}; choose group, batch or none"
            )
        return self


class PpoClipLoss(Section):
    """Clipped surrogate of PPO (arXiv 1707.06347) with separate bounds (DAPO)."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """Loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""


class DualClipLoss(Section):
    """PPO clip, and for negative advantages a bound on the loss (arXiv 1912.09729)."""

    name: Literal["dual_clip"] = "dual_clip"
    """Loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Ratio at which the loss of a negative advantage stops growing."""


class GspoLoss(Section):
    """Clipped surrogate with the length-normalised ratio of the sequence (arXiv 2507.18071)."""

    name: Literal["gspo"] = "gspo"
    """Loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence ratio is clipped above at 1 + clip_high."""
    normalise: bool = True
    """The ratio is the geometric mean over tokens; False takes the product."""


class CispoLoss(Section):
    """REINFORCE with a clipped, detached ratio as weight (MiniMax-M1, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """Loss."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low; 1 means no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is at most 1 + clip_high."""
    mask_clipped: bool = False
    """Drop tokens that PPO's clip would drop, instead of keeping them at the bound."""


class ToprLoss(Section):
    """REINFORCE on positive samples, truncated ratio on the others (arXiv 2503.14286)."""

    name: Literal["topr"] = "topr"
    """Loss."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight of a sample that is not positive is at least 1 - clip_low."""
    clip_high: float = Field(default=0.0, ge=0)
    """The weight of a sample that is not positive is at most 1 + clip_high."""
    positive_above: float = 0.0
    """A sample is positive when its raw reward is above this."""


class ReinforceLoss(Section):
    """Plain policy gradient; old log-probs are only measured."""

    name: Literal["reinforce"] = "reinforce"
    """Loss."""


class Kimi15Loss(Section):
    """REINFORCE with a quadratic pull towards the old policy (Kimi k1.5, arXiv 2501.12599)."""

    name: Literal["kimi15"] = "kimi15"
    """Loss."""
    tau: float = Field(default=0.1, ge=0)
    """Strength of the pull: tau / 2 * (log ratio)^2."""


class CustomLoss(Section):
    """A loss of the user's own, imported by path."""

    name: Literal["custom"] = "custom"
    """Loss."""
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function with the signature described in mrl.algorithms.losses."""
    options: dict[str, float | int | bool | str] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def _loss_name(value: Any) -> str:
    name = value.get("name", "ppo_clip") if isinstance(value, dict) else getattr(value, "name", None)
    return _named("loss", _Losses)(name)


def _named_loss(value: Any) -> Any:
    """A loss without a name is ppo_clip; an unknown name is refused with the known ones."""
    if not isinstance(value, dict):
        return value
    return value | {"name": _loss_name(value)}


PolicyLoss = Annotated[
    Annotated[
        PpoClipLoss
        | DualClipLoss
        | GspoLoss
        | CispoLoss
        | ToprLoss
        | ReinforceLoss
        | Kimi15Loss
        | CustomLoss,
        Discriminator("name"),
    ],
    BeforeValidator(_named_loss),
]


class AggregationSection(Section):
    """How per-token losses of one optimizer step become one number."""

    mode: Aggregation = "sequence_mean"
    """token_mean: over all tokens of the step; sequence_mean: mean over sequences of token means; constant: Dr. GRPO."""
    length: int | None = Field(default=None, ge=1)
    """constant: sums over tokens are divided by sequences times this length."""

    @model_validator(mode="after")
    def _length_where_needed(self) -> AggregationSection:
        if (self.mode == "constant") != (self.length is not None):
            raise ValueError(
                f"aggregation.length = {self.length} with mode = {self.mode}: constant needs a length (Dr. GRPO takes "
                "rollout.max_response_tokens), the other modes take none"
            )
        return self


class ControllerSection(Section):
    """How the KL coefficient moves from step to step."""

    kind: Literal["fixed", "adaptive", "window"] = "fixed"
    """fixed: stays; adaptive: proportional to the error (arXiv 1909.08593); window: grows or shrinks outside a band."""
    target: float | None = Field(default=None, gt=0)
    """adaptive: KL per token, in nats, that is held."""
    horizon: int = Field(default=10_000, ge=1)
    """adaptive: samples over which a relative error of e changes the coefficient by the share e (e limited to 0.2)."""
    low: float | None = Field(default=None, ge=0)
    """window: below this mean KL the coefficient is divided by factor."""
    high: float | None = Field(default=None, gt=0)
    """window: above this mean KL the coefficient is multiplied by factor."""
    factor: float = Field(default=1.5, gt=1)
    """window: size of a change."""
    window_steps: int = Field(default=10, ge=1)
    """window: steps averaged before each decision."""

    @model_validator(mode="after")
    def _complete(self) -> ControllerSection:
        if self.kind == "adaptive" and self.target is None:
            raise ValueError(
                "kl.controller.kind = adaptive needs kl.controller.target (KL per token in nats)"
            )
        if self.kind == "window" and (self.low is None or self.high is None or self.low >= self.high):
            raise ValueError(
                f"kl.controller.kind = window needs low < high; got low = {self.low}, high = {self.high}"
            )
        return self


class KlSection(Section):
    """Distance to the reference policy."""

    place: Literal["off", "reward", "loss"] = "off"
    """Subtracted from each token's reward, added to the loss, or neither."""
    kind: KlKind = "k3"
    """Estimator of the KL per token."""
    coefficient: float = Field(default=0.0, ge=0)
    """Weight (start value where the controller moves it)."""
    clamp: float | None = Field(default=10.0, gt=0)
    """Largest absolute estimate of one token, in nats; clamped tokens are counted; None means no clamp."""
    times_ratio: bool = False
    """In the loss: multiply by the policy ratio, which makes the gradient unbiased (DeepSeek-V3.2)."""
    controller: ControllerSection = ControllerSection()
    """How the coefficient moves."""

    @model_validator(mode="after")
    def _coefficient_has_a_place(self) -> KlSection:
        if self.place == "off" and self.coefficient > 0:
            raise ValueError(
                f"kl.coefficient = {self.coefficient} with kl.place = off; choose reward or loss"
            )
        if self.place != "off" and self.coefficient == 0:
            raise ValueError(f"kl.place = {self.place} needs kl.coefficient above 0")
        if self.times_ratio and self.place != "loss":
            raise ValueError(f"kl.times_ratio is for kl.place = loss, not {self.place}")
        return self


class EntropySection(Section):
    """Entropy bonus; entropies are of the distribution at the sampling temperature."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the bonus (start value where a target is given)."""
    target: float | None = Field(default=None, gt=0)
    """Mean entropy in nats below which the bonus acts and grows; None keeps the coefficient fixed."""
    delta: float = Field(default=0.005, gt=0)
    """Change of the coefficient per step towards the target."""
    max_coefficient: float = Field(default=1.0, gt=0)
    """Upper bound of the moving coefficient."""


class CorrectionSection(Section):
    """Weights exp(old - sampler log-prob) against the difference between trainer and engine."""

    kind: CorrectionKind = "off"
    """What is applied; the difference is measured in any case."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound of weight (truncated, geometric, product) or of what is kept (icepop, sequence_mask)."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of weight or of what is kept."""
    token_weights: Literal["none", "raw", "truncated"] = "none"
    """sequence_mask: weights of the tokens in kept sequences."""

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionSection:
        if self.low >= self.high:
            raise ValueError(f"correction.low = {self.low} must be below correction.high = {self.high}")
        return self


class OverlongSection(Section):
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13)."""

    max_tokens: int = Field(ge=1)
    """Length at which the full penalty is reached."""
    buffer_tokens: int = Field(ge=1)
    """Tokens before max_tokens over which the penalty grows linearly."""
    factor: float = Field(default=1.0, ge=0)
    """Full penalty."""
    capped: bool = True
    """The penalty stops growing at max_tokens."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongSection:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"overlong.buffer_tokens = {self.buffer_tokens} exceeds max_tokens = {self.max_tokens}"
            )
        return self


class NormaliseSection(Section):
    """Centring and scaling of rewards before the estimator."""

    mean: Literal["none", "batch", "group", "running"] = "none"
    """Subtract the mean over this set."""
    std: Literal["none", "batch", "group", "running"] = "none"
    """Divide by the standard deviation over this set."""
    ddof: Literal[0, 1] = 1
    """Delta degrees of freedom of the standard deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class ShapingSection(Section):
    """What happens to a domain's rewards before the estimator, in the order of the fields."""

    clip_low: float | None = None
    """Lower bound of the raw reward."""
    clip_high: float | None = None
    """Upper bound of the raw reward."""
    length_reference: float | None = Field(default=None, gt=0)
    """Rewards are multiplied by length_reference / response tokens; None leaves them."""
    overlong: OverlongSection | None = None
    """Soft length penalty."""
    stop_properly: float | None = Field(default=None, le=1)
    """Truncated samples: in [0, 1] multiplies a positive reward, below 0 replaces the reward (ProRL)."""
    missing_end_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a sample without an end-of-text token."""
    normalise: NormaliseSection = NormaliseSection()
    """Centring and scaling, within the domain."""
    weight: float = Field(default=1.0, ge=0)
    """Factor on the domain's shaped rewards."""

    @model_validator(mode="after")
    def _ordered(self) -> ShapingSection:
        if self.clip_low is not None and self.clip_high is not None and self.clip_low >= self.clip_high:
            raise ValueError(f"shaping.clip_low = {self.clip_low} must be below clip_high = {self.clip_high}")
        return self


class FilterSection(Section):
    """Dynamic sampling: which groups are worth training on, and what may be spent to find them."""

    min_spread: float | None = Field(default=0.0, ge=0)
    """A group is kept if max - min of its raw rewards is above this; None does not look at the spread."""
    mean_low: float | None = None
    """A group is kept if its mean reward is above this."""
    mean_high: float | None = None
    """A group is kept if its mean reward is below this."""
    max_rounds: int = Field(default=4, ge=1)
    """Rounds of generation in one step."""
    max_prompts: int = Field(default=4096, ge=1)
    """Prompts sampled in one step."""
    when_spent: Literal["train_on_fewer", "stop"] = "train_on_fewer"
    """What happens when rounds or prompts are spent and groups are missing."""

    @model_validator(mode="after")
    def _tests_something(self) -> FilterSection:
        low, high = self.mean_low, self.mean_high
        if self.min_spread is None and low is None and high is None:
            raise ValueError(
                "filter: min_spread, mean_low and mean_high are all None; give one, or filter: null"
            )
        if low is not None and high is not None and low >= high:
            raise ValueError(f"filter.mean_low = {low} must be below filter.mean_high = {high}")
        return self


class ValueLossSection(Section):
    """The critic's loss (gae only)."""

    clip: float | None = Field(default=0.2, gt=0)
    """New values count as at most this far from the old ones; None means plain squared error."""
    aggregation: Aggregation = "token_mean"
    """How token errors are averaged over the step."""

    @model_validator(mode="after")
    def _no_constant(self) -> ValueLossSection:
        if self.aggregation == "constant":
            raise ValueError("value.aggregation: choose token_mean or sequence_mean")
        return self


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
    old_logprobs: Literal["recomputed", "sampler", "decoupled"] = "recomputed"
    """What the ratio is taken against: the trainer's recomputation, the sampler's own, or the first with the second as weight."""
    correction: CorrectionSection = CorrectionSection()
    """Train/rollout correction."""
    shaping: ShapingSection = ShapingSection()
    """Reward shaping of every domain without an entry of its own."""
    shaping_by_domain: dict[str, ShapingSection] = Field(default_factory=dict)
    """Reward shaping by domain; an entry replaces `shaping` as a whole."""
    filter: FilterSection | None = None
    """Dynamic sampling; None trains on every group."""
    value: ValueLossSection = ValueLossSection()
    """Critic loss."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's samples."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps of each pass (whole groups stay together)."""

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are read."""
        return self.kl.place != "off"

    @property
    def needs_values(self) -> bool:
        """Whether a critic is trained."""
        return self.estimator.name == "gae"

    @model_validator(mode="after")
    def _old_logprobs_fit(self) -> AlgorithmSection:
        kind = self.correction.kind
        if self.old_logprobs == "sampler" and kind != "off":
            raise ValueError(
                f"correction.kind = {kind} with old_logprobs = sampler: the ratio already holds the difference to the "
                "sampler; choose correction off, or old_logprobs recomputed or decoupled"
            )
        if self.old_logprobs == "decoupled" and kind == "off":
            raise ValueError("old_logprobs = decoupled needs a correction.kind (truncated is the usual one)")
        return self

    @model_validator(mode="after")
    def _rewards_fit(self) -> AlgorithmSection:
        if self.estimator.name == "gdpo" and self.kl.place == "reward":
            raise ValueError(
                "gdpo normalises reward parts on their own and has no place for kl.place = reward; use loss"
            )
        if self.estimator.name in ("grpo_process", "rloo_process") and self.kl.place == "reward":
            raise ValueError(
                f"{self.estimator.name} normalises process rewards, which a KL on every token would change; use kl.place = loss"
            )
        return self
