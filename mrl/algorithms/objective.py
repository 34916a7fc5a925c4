"""Objectives: the loss of one micro-batch, as configured.

Consumes: a micro-batch's new log-probs and entropies (or values), its arrays, and the step-wide denominators.
Produces: this micro-batch's share of the step's loss and metrics; shares add up over micro-batches and ranks.
Forward passes, gradients, the optimizer and the coefficient's schedule (entropy_coefficient.py) are
elsewhere.

Every objective takes [N] tensors of one packed micro-batch and its Segments. It checks all inputs together on
entry, so that the host waits for the device only once, and raises NotFiniteError there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms import correction_weights, kl
from mrl.algorithms.losses import Tokens, aggregate, loss_of, policy_loss, value_loss
from mrl.algorithms.tokens import Packed, Segments, checked
from mrl.config.sections.algorithm import AggregationSection, AlgorithmSection
from mrl.config.sections.distillation import TEACHER

_READ = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "scores")


class Objective:
    """The policy's: policy loss times correction weights, plus KL and distillation, minus entropy bonus."""

    def __init__(self, config: AlgorithmSection) -> None:
        """Raise ConfigError if a user-defined loss cannot be imported or called."""
        self._config = config
        self._loss = loss_of(config.loss)

    def __call__(
        self,
        *,
        logprobs: Tensor,
        entropy: Tensor,
        arrays: Mapping[str, Tensor],
        segments: Segments,
        denominators: Mapping[str, Any],
        divergence: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics) of one packed micro-batch, both already divided by the step's denominators.

        Args:
            logprobs, entropy: [N] with gradient.
            arrays: [N] each: loss_mask (bool), advantages, rollout_logprobs; old_logprobs (with one update
                per step the detached new ones replace them); age (staleness: versions between the weights
                that sampled a token and those trained; missing means 0); ref_logprobs for kl.location = loss;
                scores for a user-defined loss.
            denominators: Step-wide num_tokens, num_sequences; num_fresh_tokens (staleness 0) with age;
                entropy_coefficient if it moves; num_taught_tokens with teachers.
            divergence: [N] with gradient, from the teachers.
        """
        mask = arrays["loss_mask"]
        present = {name: arrays[name] for name in _READ if name in arrays}
        outputs = {"logprobs": logprobs, "entropy": entropy}
        if divergence is not None:
            outputs["divergence"] = divergence
        inputs = checked(outputs | present, mask, segments)
        tokens = Tokens(
            **_packed(inputs["logprobs"], mask, segments, denominators),
            logprobs=inputs["logprobs"],
            old_logprobs=self._old_logprobs(inputs, arrays.get("age")),
            advantages=_array(
                inputs, "advantages", "the advantage estimator (recipe.shape_and_estimate)"
            ).detach(),
            scores=inputs.get("scores"),
            rollout_logprobs=inputs.get("rollout_logprobs"),
            ref_logprobs=inputs.get("ref_logprobs"),
            entropy=inputs["entropy"].detach(),
            staleness=arrays.get("age"),
        )
        loss, metrics = policy_loss(
            self._loss, tokens, self._config.aggregation, self._weights(tokens, inputs)
        )
        metrics |= {"policy/loss": loss.detach()}
        metrics |= self._measured(tokens, inputs, arrays.get("age"), denominators)
        # a separate branch, so that autograd sums its gradient separately
        own_branch = dataclasses.replace(tokens, logprobs=logprobs.masked_fill(~mask, 0.0))
        for term, term_metrics in (
            self._kl_loss(own_branch, inputs, denominators),
            self._distillation_loss(tokens, inputs.get("divergence"), denominators),
            self._entropy_loss(tokens, inputs["entropy"], denominators),
        ):
            loss = loss + term
            metrics |= term_metrics
        return loss, metrics

    def _old_logprobs(self, inputs: Mapping[str, Tensor], age: Tensor | None) -> Tensor:
        """Return the [N] detached log-probs that the ratio is taken against.

        The weights that sampled a stale token are gone. Only the engine's log-prob preserves their value, so
        ratio and clip measure against it how far the policy has moved since. Decoupled: the ratio sees only
        the movement within the step, and the correction weight all earlier movement.
        """
        if self._config.old_logprobs == "rollout":
            return _array(inputs, "rollout_logprobs", "the rollout (old_logprobs = rollout)").detach()
        trainer = self._own_logprobs(inputs).detach()
        if age is None or self._config.old_logprobs == "decoupled":
            return trainer
        rollout = _array(inputs, "rollout_logprobs", "the rollout (some tokens are stale)")
        return torch.where(age > 0, rollout.detach(), trainer)

    def _own_logprobs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the [N] log-probs under the weights before the step's first update."""
        config = self._config
        if "old_logprobs" in inputs:
            return inputs["old_logprobs"]
        if config.epochs * config.minibatches > 1:
            raise ValueError(
                f"arrays: no old_logprobs, but epochs = {config.epochs} and "
                f"minibatches = {config.minibatches} make several updates per step; "
                "recompute old_logprobs before the first update"
            )
        return inputs["logprobs"]

    def _weights(self, tokens: Tokens, inputs: Mapping[str, Tensor]) -> Tensor | None:
        section = self._config.correction
        if section.kind == "off":
            return None
        rollout = _array(inputs, "rollout_logprobs", f"the rollout (correction.kind = {section.kind})")
        return correction_weights.weights(section, tokens, rollout)

    def _measured(
        self,
        tokens: Tokens,
        inputs: Mapping[str, Tensor],
        age: Tensor | None,
        denominators: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Measure the distance between engine and trainer on tokens of staleness 0; empty without any."""
        fresh = tokens
        if age is not None:
            if denominators["num_fresh_tokens"] == 0:
                return {}
            num_tokens = tokens.num_tokens.new_full((), denominators["num_fresh_tokens"])
            fresh = dataclasses.replace(tokens, mask=tokens.mask & (age == 0), num_tokens=num_tokens)
        if "rollout_logprobs" not in inputs:
            return {}
        return correction_weights.correction_metrics(fresh, inputs["rollout_logprobs"])

    def _kl_loss(
        self, tokens: Tokens, inputs: Mapping[str, Tensor], denominators: Mapping[str, Any]
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        section = self._config.kl
        if section.location != "loss":
            return 0.0, {}
        reference = _array(inputs, "ref_logprobs", "the reference model (kl.location = loss)").detach()
        values, clamped = kl.estimate_kl(section.kind, tokens.logprobs - reference)
        weighted = values
        if section.unbiased:
            weighted = values * tokens.ratio()
        term = section.coefficient * aggregate(weighted, tokens, self._config.aggregation)
        return term, {
            "policy/kl_reference": tokens.token_mean(values),
            "policy/kl_clamped_frac": tokens.token_mean(clamped),
            "policy/kl_loss": term.detach(),
        }

    def _distillation_loss(
        self, tokens: Tokens, divergence: Tensor | None, denominators: Mapping[str, Any]
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        section = self._config.distillation
        if section is None:
            return 0.0, {}
        if divergence is None:
            raise ValueError("divergence: missing, but algorithm.distillation needs it from the teachers")
        taught = tokens.segments.to_tokens(tokens.segments.values[TEACHER]) >= 0
        term = section.coefficient * aggregate(divergence, tokens, self._config.aggregation)
        mean = tokens.token_mean(divergence) * (
            tokens.num_tokens / max(1.0, denominators["num_taught_tokens"])
        )
        return term, {
            "distillation/divergence": mean,
            "distillation/taught_frac": tokens.token_mean(taught),
            "distillation/loss": term.detach(),
        }

    def _entropy_loss(
        self, tokens: Tokens, entropy: Tensor, denominators: Mapping[str, Any]
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        metrics = {"policy/entropy": tokens.token_mean(entropy)}
        coefficient = denominators.get("entropy_coefficient", self._config.entropy.coefficient)
        if coefficient == 0:
            return 0.0, metrics
        return -coefficient * aggregate(entropy, tokens, self._config.aggregation), metrics


class ValueObjective:
    """The critic's objective."""

    def __init__(self, config: AlgorithmSection) -> None:
        self._clip = config.value_clip
        self._aggregation = AggregationSection(mode="token_mean")

    def __call__(
        self,
        *,
        values: Tensor,
        arrays: Mapping[str, Tensor],
        segments: Segments,
        denominators: Mapping[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, metrics); values [N] with gradient, arrays: loss_mask, returns, values (old)."""
        mask = arrays["loss_mask"]
        inputs = {
            "values": values,
            "old_values": _array(arrays, "values", "the critic's forward pass before the update"),
            "returns": _array(arrays, "returns", "the advantage estimator (gae)"),
        }
        new, old, returns = checked(inputs, mask, segments).values()
        tokens = Packed(**_packed(new, mask, segments, denominators))
        return value_loss(new, old.detach(), returns.detach(), tokens, self._aggregation, clip=self._clip)


def cross_entropy(
    *,
    logprobs: Tensor,
    entropy: Tensor,
    arrays: Mapping[str, Tensor],
    segments: Segments,
    denominators: Mapping[str, Any],
    by_sequence: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics); the loss is -sum(logprobs over the mask) / num_tokens, the step's trained
    tokens on all ranks.

    `by_sequence` weighs sequences equally: the sum of the means over their masked-in tokens / num_rows.
    """
    mask = arrays["loss_mask"]
    inputs = checked({"logprobs": logprobs, "entropy": entropy}, mask, segments)
    if by_sequence:
        means = {name: segments.mean(x, mask).sum() / denominators["num_rows"] for name, x in inputs.items()}
    else:
        weight = mask.to(logprobs.dtype) / denominators["num_tokens"]
        means = {name: (x * weight).sum() for name, x in inputs.items()}
    return -means["logprobs"], {"loss": -means["logprobs"], "entropy": means["entropy"]}


def _packed(
    values: Tensor, mask: Tensor, segments: Segments, denominators: Mapping[str, Any]
) -> dict[str, Any]:
    """Build fields of Packed; denominators are filled on the device, which avoids a copy from the host."""
    counts = {n: values.new_full((), max(1.0, denominators[n])) for n in ("num_tokens", "num_sequences")}
    return {"mask": mask, "segments": segments, **counts}


def _array(arrays: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    if name not in arrays:
        raise ValueError(
            f"arrays: no {name}, which comes from {source}; present: {', '.join(sorted(arrays))}"
        )
    return arrays[name]
