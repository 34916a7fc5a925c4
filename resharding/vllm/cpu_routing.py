"""vLLM's routing on CPU for sigmoid scores without groups (MiniMax-M2). Owns nothing else of vLLM.

vLLM 0.32 routes sigmoid scores on CPU only where experts are in groups, and stops at an assertion elsewhere
(layers/fused_moe/router/cpu_router.py). All experts in one group, of which one is chosen, is the same.
"""

from __future__ import annotations

from typing import Any


def allow_sigmoid_without_groups() -> None:
    """Lets vLLM route so on CPU; routing on GPUs is another class."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    routing = CPURouter._compute_routing

    def one_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return routing(self, *args, **kwargs)

    CPURouter._compute_routing = one_group  # type: ignore[method-assign]
