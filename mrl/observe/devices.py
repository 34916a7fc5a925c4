"""Peaks of devices that people train on, for model FLOP utilisation."""

from __future__ import annotations

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
"""Dense operations per second in bfloat16 and float16 by the vendor's data sheets; the first name that a device's has in it."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The peak of a device as CUDA names it ("NVIDIA H100 80GB HBM3"); None for others, and for types without a table.

    >>> peak_flops("NVIDIA H100 PCIe", "bfloat16"), peak_flops("cpu", "bfloat16")
    (756000000000000.0, None)
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
