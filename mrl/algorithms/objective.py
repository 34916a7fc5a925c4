"""What one microbatch is asked to minimise, as the configuration names it.

Consumes: a microbatch's new log-probs and entropies (or values), its arrays, and the step-wide denominators. Produces:
this microbatch's share of the step's loss (shares are added over microbatches and ranks) and metrics of the same kind.
Not its business: forward passes, gradients, optimizer, a coefficient's movement (entropy_coefficient.py).

Every objective is called with [N] tensors of one packed microbatch and its Segments. Its inputs are checked where
they enter, all at once, so that the host waits for the device one single time; it raises NotFiniteError there.
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
    """The policy's: policy loss times correction weights, plus KL loss and distance to teachers, minus entropy bonus."""

    def __init__(self, config: AlgorithmSection) -> None:
        """ConfigError for a loss of the user's own that cannot be imported or called."""
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
        """(loss, metrics) of one packed microbatch.

        logprobs, entropy: [N], gradients flow through them; divergence: the same, from teachers. arrays: [N] each: loss_mask (bool), advantages,
        rollout_logprobs; old_logprobs (may be missing with one update per step: the new ones, detached, stand in);
        age (versions between the weights that sampled a token and those trained; missing means 0 everywhere);
        ref_logprobs for kl.location = loss; scores for a loss of the user's own. denominators: num_tokens and num_sequences of the whole
        optimizer step, num_fresh_tokens (of age 0) where there is an age, entropy_coefficient where it
        moves, num_taught_tokens where there are teachers. The loss is divided by the step's denominators already, and so are the metrics.
        """
        mask = arrays["loss_mask"]
        read = {name: arrays[name] for name in _READ if name in arrays}
        outputs = {"logprobs": logprobs, "entropy": entropy}
        if divergence is not None:
            outputs["divergence"] = divergence
        inputs = checked(outputs | read, mask, segments)
        tokens = Tokens(
            **_packed(inputs["logprobs"], mask, segments, denominators),
            logprobs=inputs["logprobs"],
            old_logprobs=self._old_logprobs(inputs, arrays.get("age")),
            advantages=_array(
                inputs, "advantages", "the advantage estimator (recipe.shape_and_estimate)"
            ).detach(),
            scores=inputs.get("scores"),
        )
        loss, metrics = policy_loss(
            self._loss, tokens, self._config.aggregation, self._weights(tokens, inputs)
        )
        metrics |= {"policy/loss": loss.detach()}
        metrics |= self._measured(tokens, inputs, arrays.get("age"), denominators)
        own_branch = dataclasses.replace(
            tokens, logprobs=logprobs.masked_fill(~mask, 0.0)
        )  # sums its gradient apart
        for term, more in (
            self._kl_loss(own_branch, inputs, denominators),
            self._distillation_loss(tokens, inputs.get("divergence"), denominators),
            self._entropy_loss(tokens, inputs["entropy"], denominators),
        ):
            loss = loss + term
            metrics |= more
        return loss, metrics

    def _old_logprobs(self, inputs: Mapping[str, Tensor], age: Tensor | None) -> Tensor:
        """[N] what the ratio is taken against, detached.

        A token of an earlier version was sampled by weights that are gone: only the engine's log-prob tells what they
        gave it, and against that ratio and clip see how far the policy has moved since. Decoupled, the ratio sees the
        step's own movement alone, and the correction's weight all that went before.
        """
        if self._config.old_logprobs == "rollout":
            return _array(inputs, "rollout_logprobs", "the rollout (old_logprobs = rollout)").detach()
        own = self._own_logprobs(inputs).detach()
        if age is None or self._config.old_logprobs == "decoupled":
            return own
        rollout = _array(inputs, "rollout_logprobs", "the rollout (some tokens are of an earlier version)")
        return torch.where(age > 0, rollout.detach(), own)

    def _own_logprobs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N] by the weights before the step's first update."""
        config = self._config
        if "old_logprobs" in inputs:
            return inputs["old_logprobs"]
        if config.epochs * config.minibatches > 1:
            raise ValueError(
                f"arrays: no old_logprobs, but epochs = {config.epochs} and minibatches = {config.minibatches} make "
                "several updates a step; recompute them before the first update"
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
        """How far the engine is from the trainer, over the tokens of the version that is trained; nothing without any."""
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
            raise ValueError("divergence: missing, which algorithm.distillation needs of the teachers")
        taught = tokens.segments.spread(tokens.segments.values[TEACHER]) >= 0
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
    """The critic's."""

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
        """(loss, metrics); values [N] with gradient, arrays: loss_mask, returns, and `values` (the old ones)."""
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
    """Of demonstrations: -sum(logprobs over the mask) / num_tokens, the step's masked tokens over all ranks; or by sequence, each of
    which counts alike: the mean over its masked tokens, summed / num_rows."""
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
    """Fields of Packed; the denominators are filled in on the device, which needs no copy from the host."""
    counts = {n: values.new_full((), max(1.0, denominators[n])) for n in ("num_tokens", "num_sequences")}
    return {"mask": mask, "segments": segments, **counts}


def _array(arrays: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    if name not in arrays:
        raise ValueError(
            f"arrays: no {name}, which comes from {source}; there are: {', '.join(sorted(arrays))}"
        )
    return arrays[name]
