"""`vllm serve`, each of whose processes ends with the one that started it: `python -m mrl.rollout.serve PARENT_PID WORDS...`.

vLLM's own engine processes live on when their server is killed. They are spawned, and a spawned process reads the main
module of its parent first, which is this one: so each of them asks the kernel for its end here.
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
    """Serve until it is ended."""
    die_with_parent(int(parent))
    import torch  # the import takes seconds, in which the parent may end

    use_own_compile_cache()
    if not torch.cuda.is_available():
        preload_by_short_paths()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    sys.argv = ["vllm serve", *words]
    # What the command calls; the command itself asks for a package of the name vllm, which the build for CPUs has not.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
