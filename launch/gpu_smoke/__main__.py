"""`make gpu-smoke`: what needs one GPU, tried in minutes: `python -m mrl.launch.gpu_smoke [--device cpu] [--only STAGE ...]`.

It prints one table; the exit code is 1 when a check failed. With `--device cpu` the same checks run over shared
memory, on small shapes. Neither vLLM nor Ray is needed; the first four stages need torch and this repository's
small dependencies (numpy, psutil, pydantic, pyzmq, xxhash), the last one megatron-core and transformers too.

kernels    experts, attention (windows and sinks too), gated delta nets, log-probs, float8, digests in bfloat16 against float64
copies     bandwidth of pinned and pageable copies
offload    a rank's off-load and reload, many times: time, the device memory that another process sees come back
transfer   the double-buffered sender to a second process (CUDA IPC): every byte arrives, bandwidth
training   a Megatron step of a small mixture of experts in float32 and bfloat16 against the CPU's, and once more; a lease
           read by the second process, off-load that gives the memory back, reload to the last bit
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import torch

from mrl.launch.gpu_smoke import copies, kernels, offload, transfer
from mrl.launch.gpu_smoke.report import Report

STAGES = ("kernels", "copies", "offload", "transfer", "training")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_smoke", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=STAGES, nargs="+", help="stages; all that can run when absent")
    parser.add_argument("--megabytes", type=int, default=1024, help="payload of the transfer")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_smoke: torch sees no CUDA device; --device cpu runs the same checks without", file=sys.stderr
        )
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    report = Report()
    for stage in options.only or STAGES:
        run_stage(stage, device, options.megabytes << 20, report)
    what = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    verdict = f"FAILED: {'; '.join(report.failed)}" if report.failed else "all checks passed"
    print(f"gpu_smoke: {verdict} on {what}, torch {torch.__version__}")
    return int(bool(report.failed))


def run_stage(stage: str, device: torch.device, payload_bytes: int, report: Report) -> None:
    """One stage; what it raises is a failed check, and the stages after it run."""
    try:
        if stage == "kernels":
            kernels.check_kernels(device, report)
        elif stage == "copies":
            copies.measure_copies(device, report)
        elif stage == "offload":
            offload.check_offload(device, report)
        elif stage == "transfer":
            transfer.check_transfer(device, payload_bytes, report)
        elif importlib.util.find_spec("megatron") is None:
            report.figure("training", "left out: megatron-core is not installed")
        else:
            from mrl.launch.gpu_smoke import training

            training.check_training(device, report)
    except Exception as error:
        report.error(stage, error)


if __name__ == "__main__":
    raise SystemExit(main())
