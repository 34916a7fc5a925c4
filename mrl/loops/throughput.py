"""Tokens per second and model FLOP utilisation of a step (PaLM, arXiv 2204.02311, appendix B). Pure.

Counts what the step's result needs, not what the machine did: one forward pass per trained sample (prompt and
response) for its generation, the forward passes of the reference, the teachers and the critic, and forward
and backward of each update. Not counted: filtered samples, recomputed old log-probs, activation
recomputation. The critic is assumed to have the policy's shape without the output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from mrl.config.sections.algorithm import AlgorithmSection
from mrl.models.facts import ModelSize

PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 8.35e14,
    "H200": 9.89e14,
    "GH200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H800 PCIe": 7.56e14,
    "H800": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "A800": 3.12e14,
    "L40S": 3.62e14,
}
"""Dense bfloat16 and float16 FLOP/s by the vendors' data sheets, by the first name in the device's name."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device ("NVIDIA H100 80GB HBM3"); None if device or dtype is unknown.

    >>> peak_flops("NVIDIA H100 PCIe", "bfloat16"), peak_flops("cpu", "bfloat16")
    (756000000000000.0, None)
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """Callable that turns a step's sample lengths and metrics into figures per device."""

    facts: ModelSize
    algorithm: AlgorithmSection
    num_devices: int
    """Slots of the run: GPUs, or processes in their place."""
    num_trainers: int
    """Devices that train; the others belong to the engines."""
    peak_flops: float | None
    """FLOP/s of one device; None leaves the utilisation out."""

    def __call__(self, lengths: np.ndarray, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the figures. `lengths` [S]: tokens per trained sample, prompt and response."""
        tokens, pairs = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum()) / 2
        policy, critic = (self.facts.forward_flops(tokens, pairs, has_head=head) for head in (True, False))
        update = (
            3
            * self.algorithm.epochs
            * sum(
                forward
                for role, forward in (("optim", policy), ("critic", critic))
                if f"{role}/grad_norm" in metrics
            )
        )
        passes = self.algorithm.needs_reference + (self.algorithm.distillation is not None)
        step = policy + update
        step += policy * passes + critic * self.algorithm.needs_values
        seconds = metrics["time/step_seconds"]
        rates = {"perf/tokens_per_second_per_device": tokens / seconds / self.num_devices}
        rates |= self._rate("step", step / self.num_devices, seconds)
        if "optim/grad_norm" in metrics:
            inside = self.algorithm.reference_in_update + (self.algorithm.distillation is not None)
            update += policy * inside
        update_seconds = metrics.get("time/update_seconds", 0.0)
        return rates | self._rate("update", update / self.num_trainers, update_seconds)

    def _rate(self, name: str, flops: float, seconds: float) -> dict[str, float]:
        if not seconds:
            return {}
        rate = flops / seconds
        rates = {f"perf/{name}_flops_per_second_per_device": rate}
        return rates if self.peak_flops is None else rates | {f"perf/{name}_mfu": rate / self.peak_flops}
