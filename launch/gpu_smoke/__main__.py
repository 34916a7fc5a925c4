"""`make gpu-smoke`: what needs a GPU, tried in a minute: `python -m mrl.launch.gpu_smoke [--device cpu]`.

Needs torch, megatron-core, transformers, safetensors and this repository's small dependencies; neither vLLM
nor Ray. Each check prints a line; the exit code is 1 when one failed. With `--device cpu` the same checks run
over shared memory.

1. one Megatron step of a tiny mixture of experts on the device; log-probs before and after against the CPU's
2. the double-buffered sender to a second process (CUDA IPC, on CPU shared memory): every byte arrives, bandwidth
3. a lease of the parameter memory read by the second process, no off-load under it; off-load, reload, the same numbers

The CUDA form has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import sys

import torch

from mrl.launch.gpu_smoke.checks import Smoke


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_smoke", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--megabytes", type=int, default=1024, help="payload of the bandwidth measurement")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_smoke: torch sees no CUDA device; --device cpu runs the same checks without", file=sys.stderr
        )
        return 2
    return Smoke(options.device, options.megabytes).run()


if __name__ == "__main__":
    raise SystemExit(main())
