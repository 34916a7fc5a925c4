"""vLLM's routing on CPU for sigmoid scores without groups (MiniMax-M2). Changes nothing else of vLLM.

vLLM 0.32 routes sigmoid scores on CPU only for grouped experts, and fails an assertion otherwise
(layers/fused_moe/router/cpu_router.py). One group of all experts, which is always chosen, is equivalent. Its
float8 experts list their routing methods without this one, although they take the router's choice as it is.
"""

from __future__ import annotations

from typing import Any


def allow_sigmoid_without_groups() -> None:
    """Let workers, also with float8 experts, use this routing."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    routing, served = CPURouter._compute_routing, CPUExpertsFp8._supports_routing_method

    def one_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return routing(self, *args, **kwargs)

    CPURouter._compute_routing = one_group  # type: ignore[method-assign]
    CPUExpertsFp8._supports_routing_method = staticmethod(  # type: ignore[method-assign]
        lambda method, *keys: method is RoutingMethodType.MiniMax2 or served(method, *keys)
    )
