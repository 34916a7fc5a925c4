"""`vllm serve` whose processes end with their parents: `python -m mrl.rollout.serve PARENT_PID WORDS...`.

vLLM's engine processes survive a killed server. They are spawned, and a spawned process first imports its
parent's main module, which is this one: here it asks the kernel to kill it when its parent ends.
"""

from __future__ import annotations

import os
import sys

from mrl.compile_cache import use_own_compile_cache
from mrl.cpu.vllm_preload import preload_by_short_paths
from mrl.processes.lifeline import die_with_parent

if __name__ == "__mp_main__":
    die_with_parent(os.getppid())


def main(parent: str, *words: str) -> None:
    """Serve until killed."""
    die_with_parent(int(parent))
    import torch  # the import takes seconds, during which the parent may end

    use_own_compile_cache()
    if not torch.cuda.is_available():
        preload_by_short_paths()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    sys.argv = ["vllm serve", *words]
    # The function that the command calls; the command needs a package named vllm, which the CPU build lacks.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
