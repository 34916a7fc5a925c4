"""Megatron's distributed optimizer, its learning-rate schedule, and the decision to skip a step.

A step whose loss or gradient is not finite on any rank changes no parameter on any rank.
"""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP

from mrl.config.sections.training import OptimizerSection
from mrl.errors import ConfigError
from mrl.training.host_state import HostOptimizerState, own_tensors
from mrl.training.platform.host_copies import HostCopies


def learning_rate(section: OptimizerSection, step: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0; the schedule is in updates (in_updates).

    >>> learning_rate(OptimizerSection(lr=1.0, warmup_steps=4), 1) 0.5
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant" or section.decay_steps is None:
        return section.lr
    span = max(1, section.decay_steps - section.warmup_steps)
    done = min(1.0, (step - section.warmup_steps) / span)
    remaining = 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.min_lr + (section.lr - section.min_lr) * remaining


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Before clipping, without a draft head's."""
    skipped: bool
    lr: float


def megatron_config(section: OptimizerSection, dtype: torch.dtype) -> OptimizerConfig:
    """Return Megatron's settings for a section; raise ConfigError if the installed packages lack them.

    With bfloat16 moments Transformer Engine's kernel also keeps the master weights: the half of each that the
    bfloat16 parameter lacks (megatron.core.optimizer.optimizer_config, store_param_remainders).
    """
    if section.moments_dtype != "float32" and dtype != torch.bfloat16:
        raise ConfigError("training.optimizer.moments_dtype = bfloat16 needs training.dtype = bfloat16")
    if section.moments_dtype != "float32" and find_spec("transformer_engine") is None:
        raise ConfigError(
            "training.optimizer.moments_dtype = bfloat16 needs Transformer Engine, which is not installed; "
            "install it or set float32"
        )
    moments = getattr(torch, section.moments_dtype)
    return OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=moments != torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )


class Optimizer:
    """Megatron's optimizer of all model chunks of this rank."""

    def __init__(
        self,
        models: list[Any],
        section: OptimizerSection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_drafts: bool = False,
    ) -> None:
        """Build it; `has_drafts`: the last stage's ranks train a draft head (draft_head.py)."""
        if section.schedule_unit != "updates":
            raise ValueError(
                f"schedule_unit = {section.schedule_unit}: convert the section with in_updates() first"
            )
        self.section = section
        self.steps = 0
        """Optimizer steps taken, without skipped ones."""
        self._device = device
        self._copies = HostCopies(device, keep=True)
        self._away: list[torch.Tensor] = []
        """Tensors that offload() moved to host memory."""
        config = megatron_config(section, dtype)
        self.megatron: Any = get_megatron_optimizer(
            config, models, use_gloo_process_groups=device.type == "cuda"
        )
        self._has_drafts = has_drafts
        self._driven = self.chained()
        """Megatron's optimizers, or the HostOptimizerState that replaces one."""
        for part in self._driven:
            part._defer_param_sync = True  # each would gather the parameters of all
        if (fraction := section.offload_fraction) > 0:
            self._driven = [
                HostOptimizerState(part, fraction, device=device, prime=prime)
                if part in self.parts()
                else part
                for part in self.chained()
            ]

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def take_parameters(self) -> None:
        """Copy model parameters into the float32 master weights (after loading)."""
        for part in self._driven:
            part.reload_model_params()

    @torch.no_grad()
    def step(self, *, finite: bool, lr: float | None = None) -> StepResult:
        """Take one step on all ranks; `finite`: this rank's loss was finite."""
        rate = learning_rate(self.section, self.steps) if lr is None else lr
        self._set_groups(rate)
        is_bad = self.megatron.prepare_grads()
        norm, draft_norm = float(self.megatron.get_grad_norm() or 0.0), 0.0
        if self._has_drafts:
            draft_norm = math.hypot(*map(_draft_norm, self.chained()))
        is_finite = finite and not is_bad and math.isfinite(norm + draft_norm)
        good = torch.tensor([float(is_finite)], device=self._device, dtype=torch.float32)
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if not good.item():
            return StepResult(grad_norm=norm, skipped=True, lr=rate)
        self._clip(norm, draft_norm)
        gathers = []
        for part, driven in zip(self.chained(), self._driven, strict=True):
            driven.step_with_ready_grads()
            gathers += _start_gather(part)
        for gather in gathers:
            gather.wait()
        self.steps += 1
        return StepResult(grad_norm=norm, skipped=False, lr=rate)

    def _set_groups(self, rate: float) -> None:
        """Set every group from the section at each step: a checkpoint restores the saved run's settings.

        Megatron marks with `wd_mult` (0 for norms and biases) which groups decay; only its own scheduler
        applies it.
        """
        section = self.section
        for group in self.megatron.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = section.weight_decay * group.get("wd_mult", 1.0)
            group["betas"] = (section.beta1, section.beta2)
            group["eps"] = section.eps
            if "foreach" in group:  # torch's Adam: it would need another copy of every shard at once
                group["foreach"] = False

    def _clip(self, norm: float, draft_norm: float) -> None:
        """Clip the model's gradients by their norm, and a draft head's by theirs."""
        if self.section.clip_grad <= 0:
            return
        for part in self.parts():
            groups: dict[float, list[torch.Tensor]] = {norm: [], draft_norm: []}
            for parameter in part.get_parameters():
                groups[draft_norm if hasattr(parameter, GRAD_NORM_GROUP_ATTR) else norm].append(parameter)
            for total, parameters in groups.items():
                if parameters:
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self.section.clip_grad,
                        total_norm=total,
                        use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                    )

    def prime(self) -> None:
        """Create the moments (as zeros) before the first step, because a checkpoint contains them."""
        for part in self.parts():
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                prime(part, parameter)

    def resting(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with a state's bytes: itself, or its copy in host memory (offload_fraction)."""
        for part in self._driven:
            if isinstance(part, HostOptimizerState) and (copy := part.resting(tensor)) is not None:
                return copy
        return tensor

    def common(self) -> list[dict[str, Any]]:
        """Return what ranks share of each of Megatron's optimizers: group settings and step count."""
        return [part.state_dict() for part in self.chained()]

    def load(self, states: Any) -> None:
        """Take loaded common() after the tensors are in place.

        Megatron gives all of torch Adam's parameters one step-count tensor, which Adam would increase once
        per parameter: each gets its own. Megatron also finds groups by their peak and lowest rates
        (param_group_identifier_keys), which may differ between this run and the saved one.
        """
        for part, driven, state in zip(self.chained(), self._driven, states, strict=True):
            for group in state.get("optimizer", {}).get("param_groups", []):
                group |= {"max_lr": self.section.lr, "min_lr": self.section.min_lr}
            driven.load_state_dict({key: state[key] for key in state if not key.startswith("param_state")})
            for moments in part.optimizer.state.values():
                if torch.is_tensor(count := moments.get("step")):
                    moments["step"] = count.clone()

    def offload(self) -> None:
        """Move master weights and moments from the device to host memory, once."""
        if self._device.type == "cpu" or self._away:
            return
        self._away = self._own_tensors()
        self._copies.move_out(self._away)

    def reload(self) -> None:
        """Move back what offload() moved."""
        self._copies.move_back(self._away)
        self._away = []

    def _own_tensors(self) -> list[torch.Tensor]:
        """Return the master weights and moments that are on the device."""
        return [
            tensor
            for part in self.parts()
            for group in part.optimizer.param_groups
            for parameter in group["params"]
            for tensor in own_tensors(part.optimizer, parameter)
        ]

    def parts(self) -> list[Any]:
        """Return Megatron's optimizers that are not empty on this rank."""
        return [part for part in self.chained() if not getattr(part, "is_stub_optimizer", False)]

    def chained(self) -> list[Any]:
        """Return all of Megatron's optimizers: dense and expert parameters have separate ones."""
        return list(getattr(self.megatron, "chained_optimizers", [self.megatron]))


def _draft_norm(part: Any) -> float:
    """Return the norm of a draft head's gradients in one of Megatron's optimizers, equal on all ranks."""
    gradients = part.get_grads_for_grad_norm(MTP_GRAD_NORM_GROUP)
    return float(
        get_grad_norm_fp32(gradients, grad_stats_parallel_group=part.get_grad_stats_parallel_group())
    )


def _start_gather(part: Any) -> list[Any]:
    """Start gathering one optimizer's stepped parameters to their replicas, while the next optimizer steps;
    return the handles to wait for."""
    return [
        dist.all_gather_single(
            bucket.param_data,
            shard_buffer(bucket.param_data, size)[buffer.data_parallel_group.rank()],
            group=buffer.data_parallel_group,
            async_op=True,
        )
        for buffer in getattr(part, "buffers", ())  # none if it is empty
        if (size := buffer.data_parallel_world_size) > 1
        for bucket in buffer.buckets
    ]


def prime(part: Any, parameter: torch.Tensor) -> None:
    """Create a parameter's moments, as zeros, in one of Megatron's optimizers."""
    if part.optimizer.state.get(parameter):
        return
    if isinstance(part.optimizer, torch.optim.Adam):
        part.optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    else:  # Transformer Engine's, master weights included; not yet run on a GPU
        narrow = part.optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        part.optimizer.initialize_state(parameter, narrow)
