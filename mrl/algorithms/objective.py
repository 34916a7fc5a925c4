"""What one microbatch is asked to minimise, as the configuration names it.

Consumes: a microbatch's new log-probs and entropies, its arrays, and the step-wide denominators. Produces: this
microbatch's share of the step's loss (shares are added over microbatches and ranks) and metrics of the same kind.
Not its business: forward passes, gradients, optimizer, coefficients' movement (state.State).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms import checks, correction, kl
from mrl.algorithms.aggregation import aggregate_flat
from mrl.algorithms.losses import policy_loss, token_mean, value_loss
from mrl.algorithms.policy_losses import Loss
from mrl.algorithms.segments import Reduce, Segments
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.policy_loss import CustomLoss
from mrl.errors import ConfigError


class Objective:
    """Policy loss times correction weights, plus KL loss, minus entropy bonus."""

    def __init__(self, config: AlgorithmSection) -> None:
        self._config = config
        self._loss, self._options = _resolve(config)

    def __call__(
        self,
        *,
        logprobs: Tensor,
        entropy: Tensor,
        arrays: Mapping[str, Tensor],
        segment_ids: Tensor,
        denominators: Mapping[str, Any],
        reduce: Reduce | None = None,
        num_segments: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics) of one packed microbatch.

        logprobs, entropy: [N], gradients flow through them. arrays: [N] each: loss_mask (bool), advantages,
        rollout_logprobs; old_logprobs (may be missing with one update per step: the new ones, detached, stand in);
        age (versions between the weights that sampled a token and those trained; missing means 0 everywhere);
        ref_logprobs for kl.location = loss; scores for topr. segment_ids: [N] int64. denominators: num_tokens and
        num_sequences of the whole optimizer step, num_fresh_tokens (of age 0) where there is an age, and kl_coefficient
        and entropy_coefficient where a controller moves them. The loss is divided by the step's denominators already;
        metrics follow the rule in losses.
        """
        mask = arrays["loss_mask"]
        num_tokens, num_sequences = denominators["num_tokens"], denominators["num_sequences"]
        old = self._old_logprobs(logprobs, arrays)
        place: dict[str, Any] = {"segment_ids": segment_ids, "num_segments": num_segments, "reduce": reduce}
        loss, metrics = policy_loss(
            self._loss,
            logprobs=logprobs,
            old_logprobs=old,
            advantages=_array(arrays, "advantages", "the advantage estimator (recipe.shape_and_estimate)"),
            loss_mask=mask,
            aggregation=self._config.aggregation.mode,
            constant=self._config.aggregation.length,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            weights=self._weights(old, arrays, place),
            scores=arrays.get("scores"),
            **place,
            **self._options,
        )
        metrics |= {"policy/loss": loss.detach()} | self._measured(old, arrays, denominators, place)
        for term, found in (
            self._kl_loss(logprobs, old, arrays, denominators, place),
            self._entropy_loss(entropy, arrays, denominators, place),
        ):
            loss = loss + term
            metrics |= found
        return loss, metrics

    def _old_logprobs(self, logprobs: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """[N] what the ratio is taken against.

        A token of an earlier version was sampled by weights that are gone: only the engine's log-prob tells what they
        gave it, and against that ratio and clip see how far the policy has moved since.
        """
        if self._config.old_logprobs == "rollout":
            return _array(arrays, "rollout_logprobs", "the rollout (old_logprobs = rollout)")
        own = self._own_logprobs(logprobs, arrays)
        if "age" not in arrays:
            return own
        rollout = _array(arrays, "rollout_logprobs", "the rollout (some tokens are of an earlier version)")
        return torch.where(arrays["age"] > 0, rollout, own)

    def _own_logprobs(self, logprobs: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """[N] by the weights before the step's first update."""
        config = self._config
        if "old_logprobs" in arrays:
            return arrays["old_logprobs"]
        if config.epochs * config.minibatches > 1:
            raise ValueError(
                f"arrays: no old_logprobs, but epochs = {config.epochs} and minibatches = {config.minibatches} make "
                "several updates a step; recompute them before the first update"
            )
        return logprobs.detach()

    def _weights(self, old: Tensor, arrays: Mapping[str, Tensor], place: dict[str, Any]) -> Tensor | None:
        section = self._config.correction
        if section.kind == "off":
            return None
        return correction.weights(
            section.kind,
            old_logprobs=old,
            rollout_logprobs=_array(
                arrays, "rollout_logprobs", f"the rollout (correction.kind = {section.kind})"
            ),
            loss_mask=arrays["loss_mask"],
            **section.model_dump(exclude={"kind"}),
            **place,
        )

    def _measured(
        self,
        old: Tensor,
        arrays: Mapping[str, Tensor],
        denominators: Mapping[str, Any],
        place: dict[str, Any],
    ) -> dict[str, Tensor]:
        """How far the engine is from the trainer, over the tokens of the version that is trained; nothing without any."""
        mask, num_tokens = arrays["loss_mask"], denominators["num_tokens"]
        if "age" in arrays:
            mask, num_tokens = mask & (arrays["age"] == 0), denominators["num_fresh_tokens"]
        if "rollout_logprobs" not in arrays or num_tokens == 0:
            return {}
        return correction.measure(
            old_logprobs=old,
            rollout_logprobs=arrays["rollout_logprobs"],
            loss_mask=mask,
            num_tokens=num_tokens,
            **place,
        )

    def _kl_loss(
        self,
        logprobs: Tensor,
        old: Tensor,
        arrays: Mapping[str, Tensor],
        denominators: Mapping[str, Any],
        place: dict[str, Any],
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        section = self._config.kl
        if section.location != "loss":
            return 0.0, {}
        reference = _array(arrays, "ref_logprobs", "the reference model (kl.location = loss)")
        mask, segments = _flat_mask(arrays, place)
        named = {"logprobs": logprobs, "ref_logprobs": reference, "old_logprobs": old}
        clean = checks.per_token(named, mask, segments)
        values, clamped = kl.estimate_counted(
            section.kind, clean["logprobs"], clean["ref_logprobs"].detach(), clamp=section.clamp
        )
        weighted = values
        if section.unbiased:
            weighted = values * torch.exp((clean["logprobs"] - clean["old_logprobs"].detach()).clamp(-20, 20))
        coefficient = denominators.get("kl_coefficient", section.coefficient)
        term = coefficient * self._aggregate(weighted, mask, segments, denominators, place)
        num_tokens = denominators["num_tokens"]
        return term, {
            "policy/kl_reference": token_mean(values, mask, num_tokens),
            "policy/kl_clamped_frac": token_mean(clamped, mask, num_tokens),
            "policy/kl_loss": term.detach(),
        }

    def _entropy_loss(
        self,
        entropy: Tensor,
        arrays: Mapping[str, Tensor],
        denominators: Mapping[str, Any],
        place: dict[str, Any],
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        mask, segments = _flat_mask(arrays, place)
        values = checks.per_token({"entropy": entropy}, mask, segments)["entropy"]
        metrics = {"policy/entropy": token_mean(values, mask, denominators["num_tokens"])}
        coefficient = denominators.get("entropy_coefficient", self._config.entropy.coefficient)
        if coefficient == 0:
            return 0.0, metrics
        return -coefficient * self._aggregate(values, mask, segments, denominators, place), metrics

    def _aggregate(
        self,
        values: Tensor,
        mask: Tensor,
        segments: Segments,
        denominators: Mapping[str, Any],
        place: dict[str, Any],
    ) -> Tensor:
        return aggregate_flat(
            values,
            mask,
            self._config.aggregation.mode,
            segments,
            num_tokens=denominators["num_tokens"],
            num_sequences=denominators["num_sequences"],
            constant=self._config.aggregation.length,
            reduce=place["reduce"],
        )


class ValueObjective:
    """The critic's loss of one microbatch."""

    def __init__(self, config: AlgorithmSection) -> None:
        self._section = config.value

    def __call__(
        self,
        *,
        values: Tensor,
        arrays: Mapping[str, Tensor],
        segment_ids: Tensor,
        denominators: Mapping[str, Any],
        reduce: Reduce | None = None,
        num_segments: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics); values [N] with gradient, arrays: loss_mask, returns, and `values` (the old ones)."""
        return value_loss(
            values=values,
            old_values=_array(arrays, "values", "the critic's forward pass before the update"),
            returns=_array(arrays, "returns", "the advantage estimator (gae)"),
            loss_mask=arrays["loss_mask"],
            segment_ids=segment_ids,
            num_segments=num_segments,
            clip=self._section.clip,
            aggregation=self._section.aggregation,
            num_tokens=denominators["num_tokens"],
            num_sequences=denominators["num_sequences"],
            reduce=reduce,
        )


def _resolve(config: AlgorithmSection) -> tuple[str | Loss, dict[str, Any]]:
    """The configured loss and its options."""
    section = config.loss
    if not isinstance(section, CustomLoss):
        return section.name, section.model_dump(exclude={"name"})
    return _imported(section), dict(section.options)


def _imported(section: CustomLoss) -> Loss:
    """The user's function; ConfigError where it is not there, or cannot be called with one batch and its options."""
    place, _, name = section.function.partition(":")
    setting = f"algorithm.loss.function = {section.function}"
    try:
        module = importlib.import_module(place)
    except Exception as error:  # whatever the user's module raises while it is read
        raise ConfigError(
            f"{setting}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function: Loss | None = getattr(module, name, None)
    if not callable(function):
        offered = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise ConfigError(
            f"{setting}: {place} has no function {name!r}; it has {', '.join(offered) or 'none'}"
        )
    try:
        inspect.signature(function).bind(None, **section.options)
    except TypeError as error:
        options = ", ".join(f"{key}=..." for key in section.options)
        raise ConfigError(
            f"{setting}: it is called as {name}({', '.join(filter(None, ['tokens', options]))}), and has the signature "
            f"{inspect.signature(function)}: {error}"
        ) from error
    return function


def _array(arrays: Mapping[str, Tensor], name: str, source: str) -> Tensor:
    if name not in arrays:
        raise ValueError(
            f"arrays: no {name}, which comes from {source}; there are: {', '.join(sorted(arrays))}"
        )
    return arrays[name]


def _flat_mask(arrays: Mapping[str, Tensor], place: dict[str, Any]) -> tuple[Tensor, Segments]:
    mask = checks.mask("loss_mask", arrays["loss_mask"])
    return mask, Segments.of(mask, segment_ids=place["segment_ids"], num_segments=place["num_segments"])
