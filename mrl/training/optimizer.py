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
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mrl.config.sections.training import OptimizerSection
from mrl.errors import ConfigError
from mrl.training.host_state import HostState, own_tensors
from mrl.training.platform.host_copies import HostCopies


def learning_rate(section: OptimizerSection, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0; the schedule is in updates (in_updates).

    >>> learning_rate(OptimizerSection(lr=1.0, warmup_steps=4), 1)
    0.5
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant" or section.decay_steps is None:
        return section.lr
    span = max(1, section.decay_steps - section.warmup_steps)
    done = min(1.0, (step - section.warmup_steps) / span)
    left = 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.min_lr + (section.lr - section.min_lr) * left


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping."""
    skipped: bool
    lr: float


def megatron_config(section: OptimizerSection, dtype: torch.dtype) -> OptimizerConfig:
    """What Megatron is told of a section; ConfigError where the installed packages cannot do it.

    With bfloat16 moments Transformer Engine's kernel holds the master weights too: the half of each that the bfloat16
    parameter does not hold (megatron.core.optimizer.optimizer_config, store_param_remainders).
    """
    if section.moments_dtype != "float32" and dtype != torch.bfloat16:
        raise ConfigError("training.optimizer.moments_dtype = bfloat16 needs training.dtype = bfloat16")
    if section.moments_dtype != "float32" and find_spec("transformer_engine") is None:
        raise ConfigError(
            "training.optimizer.moments_dtype = bfloat16 needs Transformer Engine, which is not installed; install it "
            "or set float32"
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
        self, models: list[Any], section: OptimizerSection, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        if section.schedule_unit != "updates":
            raise ValueError(
                f"schedule_unit = {section.schedule_unit}: convert the section with in_updates() first"
            )
        self.section = section
        self.steps = 0
        """Optimizer steps taken (skipped ones not counted)."""
        self._device = device
        self._copies = HostCopies(device, keep=True)
        self._away: list[torch.Tensor] = []
        """What offload() moved to the host's memory."""
        config = megatron_config(section, dtype)
        self.megatron: Any = get_megatron_optimizer(
            config, models, use_gloo_process_groups=device.type == "cuda"
        )
        self._driven = self.chained()
        """Megatron's optimizers, or what stands for one whose state rests in the host's memory."""
        for part in self._driven:
            part._defer_param_sync = True  # each would gather the parameters of all
        if (fraction := section.offload_fraction) > 0:
            self._driven = [
                HostState(part, fraction, device=device, prime=prime) if part in self.parts() else part
                for part in self.chained()
            ]

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def take_parameters(self) -> None:
        """Copies model parameters into the float32 master weights (after loading)."""
        for part in self._driven:
            part.reload_model_params()

    @torch.no_grad()
    def step(self, *, finite: bool, lr: float | None = None) -> StepResult:
        """One step of all ranks. `finite` says whether this rank's loss was."""
        rate = learning_rate(self.section, self.steps) if lr is None else lr
        self._set_groups(rate)
        is_bad = self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm() or 0.0)
        good = torch.tensor(
            [float(finite and not is_bad and math.isfinite(norm))],
            device=self._device,
            dtype=torch.float32,
        )
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if not good.item():
            return StepResult(grad_norm=norm, skipped=True, lr=rate)
        self._clip(norm)
        gathers = []
        for part, driven in zip(self.chained(), self._driven, strict=True):
            driven.step_with_ready_grads()
            gathers += _start_gather(part)
        for gather in gathers:
            gather.wait()
        self.steps += 1
        return StepResult(grad_norm=norm, skipped=False, lr=rate)

    def _set_groups(self, rate: float) -> None:
        """Every group gets its settings from the section, each step: a checkpoint brings back the saved
        run's.

        Megatron says with `wd_mult` (0 for norms and biases) which groups decay; its own scheduler alone acts
        on it.
        """
        section = self.section
        for group in self.megatron.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = section.weight_decay * group.get("wd_mult", 1.0)
            group["betas"] = (section.beta1, section.beta2)
            group["eps"] = section.eps
            if "foreach" in group:  # torch's Adam: it would hold one more copy of every shard at once
                group["foreach"] = False

    def _clip(self, norm: float) -> None:
        if self.section.clip_grad <= 0:
            return
        for part in self.parts():
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=self.section.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )

    def prime(self) -> None:
        """Makes the moments exist (as zeros) before the first step: a checkpoint holds them."""
        for part in self.parts():
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                prime(part, parameter)

    def resting(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with a state's bytes: itself, or its copy where it rests in the host's memory (offload_fraction)."""
        for part in self._driven:
            if isinstance(part, HostState) and (found := part.resting(tensor)) is not None:
                return found
        return tensor

    def common(self) -> list[dict[str, Any]]:
        """What all ranks share of each of Megatron's optimizers: the groups' settings and the step count."""
        return [part.state_dict() for part in self.chained()]

    def load(self, states: Any) -> None:
        """Takes loaded common() once the tensors are in place.

        Megatron gives all of torch Adam's parameters one and the same step count, which Adam would increase
        once per parameter: each gets its own. It finds groups by their peak and least rates too
        (param_group_identifier_keys), which are this run's and may be others than the saved run's.
        """
        for part, driven, own in zip(self.chained(), self._driven, states, strict=True):
            for group in own.get("optimizer", {}).get("param_groups", []):
                group |= {"max_lr": self.section.lr, "min_lr": self.section.min_lr}
            driven.load_state_dict({key: own[key] for key in own if not key.startswith("param_state")})
            for moments in part.optimizer.state.values():
                if torch.is_tensor(count := moments.get("step")):
                    moments["step"] = count.clone()

    def offload(self) -> None:
        """Moves master weights and moments from the device to the host's memory, once."""
        if self._device.type == "cpu" or self._away:
            return
        self._away = self._own_tensors()
        self._copies.move_out(self._away)

    def reload(self) -> None:
        """Brings back what offload() moved."""
        self._copies.move_back(self._away)
        self._away = []

    def _own_tensors(self) -> list[torch.Tensor]:
        """The master weights and moments that are on the device."""
        return [
            tensor
            for part in self.parts()
            for group in part.optimizer.param_groups
            for parameter in group["params"]
            for tensor in own_tensors(part.optimizer, parameter)
        ]

    def parts(self) -> list[Any]:
        """Megatron's optimizers that hold something here."""
        return [part for part in self.chained() if not getattr(part, "is_stub_optimizer", False)]

    def chained(self) -> list[Any]:
        """Megatron keeps dense and expert parameters in optimizers of their own."""
        return list(getattr(self.megatron, "chained_optimizers", [self.megatron]))


def _start_gather(part: Any) -> list[Any]:
    """Starts to bring the parameters that one of Megatron's optimizers has stepped from each rank to its replicas, while the
    next one steps; what to wait for."""
    return [
        dist.all_gather_single(
            bucket.param_data,
            shard_buffer(bucket.param_data, size)[buffer.data_parallel_group.rank()],
            group=buffer.data_parallel_group,
            async_op=True,
        )
        for buffer in getattr(part, "buffers", ())  # none where it holds nothing
        if (size := buffer.data_parallel_world_size) > 1
        for bucket in buffer.buckets
    ]


def prime(part: Any, parameter: torch.Tensor) -> None:
    """Makes a parameter's moments exist, as zeros, in one of Megatron's optimizers."""
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
