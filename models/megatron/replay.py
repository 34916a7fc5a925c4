"""Replace a router's choice of experts during a pass: replay given choices, or record the router's own.

Megatron's routing asks `TopKRouter.router_replay` for the experts of each token (`get_replay_topk`). These
classes replace Megatron's RouterReplay, whose list of all routers of a process would mix a critic's with the
policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.errors import RoutingError

Choose = Callable[..., tuple[Tensor, Tensor]]
"""Megatron's choice: (scores [tokens, experts], k, num_groups, group_topk) -> scores, experts [tokens, k]."""


class ReplayedRouting:
    """One router's given experts in a pass over several micro-batches. Their weights come from the pass's own
    scores, so that gradients reach the router.

    A recomputed layer uses the same experts again: micro-batches go backward in the order in which they went
    forward.
    """

    def __init__(self, experts: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """`experts`: [tokens, k] per micro-batch; `known`: [tokens] bool, False for placeholders."""
        self._experts, self._known = experts, known
        self.microbatch: int | None = None
        """Index of the micro-batch in its forward step; None outside of forward steps."""
        self._forward: list[int] = []
        self._again = 0
        self.agreement = torch.zeros(2, dtype=torch.int64, device=experts[0].device)
        """Choices of known tokens: those that the router would also have made, and all."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Return (scores [tokens, k] of the given experts, the experts)."""
        number = self._next()
        experts = self._experts[number].long()
        if experts.shape != (len(scores), topk):
            raise RoutingError(
                f"micro-batch {number}: the given experts have shape {tuple(experts.shape)}, not "
                f"{(len(scores), topk)}"
            )
        if self.microbatch is not None:
            _, own_experts = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            known = self._known[number]
            agreed = (experts.unsqueeze(2) == own_experts.unsqueeze(1)).any(2) & known.unsqueeze(1)
            self.agreement += torch.stack([agreed.sum(), known.sum() * topk])
        return scores.gather(1, experts), experts

    def _next(self) -> int:
        if self.microbatch is not None:
            self._forward.append(self.microbatch)
            return self.microbatch
        number, self._again = self._again, self._again + 1
        if number >= len(self._forward):
            raise RoutingError(f"micro-batch {number} is recomputed before its forward pass")
        return number

    def require_all_taken(self, router: str) -> None:
        """Raise RoutingError unless every micro-batch used its experts once, and all or none recomputed."""
        count = len(self._experts)
        if self._forward != list(range(count)) or self._again not in (0, count):
            raise RoutingError(
                f"{router}: of {count} micro-batches, these used their given experts: {self._forward}; "
                f"recomputed: {self._again}"
            )


class RecordedRouting:
    """One router's own choices in a pass, by micro-batch."""

    def __init__(self) -> None:
        self.microbatch: int | None = None
        """As in Given."""
        self.experts: dict[int, Tensor] = {}
        """[tokens, k] of each micro-batch that went forward."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Return the router's own choice and record it."""
        values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.microbatch is not None:
            self.experts[self.microbatch] = experts.detach()
        return values, experts

    def require_all_taken(self, router: str) -> None:
        """Do nothing: a record has the length of the pass."""
