"""What stands in the place of a router's own choice for the length of a pass: choices that are given, or a record of its own.

Megatron's routing asks `TopKRouter.router_replay` for the experts of each token (`get_replay_topk`); these classes answer in
the place of Megatron's RouterReplay, whose list of all routers of a process would mix a critic's with the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.errors import RoutingError

Choose = Callable[..., tuple[Tensor, Tensor]]
"""Megatron's own choice: (scores [tokens, experts], k, num_groups, group_topk) -> (scores, experts) [tokens, k]."""


class Given:
    """One router's experts in a pass over several microbatches. The weights of the experts are those of the pass's scores, so
    that gradients reach the router.

    A layer that the backward pass computes again takes the same ones again: microbatches go backward in the order in
    which they went forward.
    """

    def __init__(self, experts: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """`experts`: [tokens, k] of each microbatch; `known`: [tokens] bool, False for what fills the place of a choice."""
        self._experts, self._known = experts, known
        self.microbatch: int | None = None
        """The one that is in its forward step; None outside of forward steps."""
        self._forward: list[int] = []
        self._again = 0
        self.agreement = torch.zeros(2, dtype=torch.int64, device=experts[0].device)
        """Of the known tokens' choices: those that the router would have made too, and all."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Choose,
    ) -> tuple[Tensor, Tensor]:
        """(scores [tokens, k] of the given experts, the experts)."""
        number = self._next()
        experts = self._experts[number].long()
        if experts.shape != (len(scores), topk):
            raise RoutingError(
                f"microbatch {number}: experts {tuple(experts.shape)} were given for a choice of {(len(scores), topk)}"
            )
        if self.microbatch is not None:
            _, own = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            known = self._known[number]
            agreed = (experts.unsqueeze(2) == own.unsqueeze(1)).any(2) & known.unsqueeze(1)
            self.agreement += torch.stack([agreed.sum(), known.sum() * topk])
        return scores.gather(1, experts), experts

    def _next(self) -> int:
        if self.microbatch is not None:
            self._forward.append(self.microbatch)
            return self.microbatch
        number, self._again = self._again, self._again + 1
        if number >= len(self._forward):
            raise RoutingError(f"microbatch {number} is computed again before it went forward")
        return number

    def require_all_taken(self, router: str) -> None:
        """RoutingError unless every microbatch took its experts once, and again either all or none did."""
        count = len(self._experts)
        if self._forward != list(range(count)) or self._again not in (0, count):
            raise RoutingError(
                f"{router}: of {count} microbatches these took their given experts: {self._forward}; computed again: "
                f"{self._again}"
            )


class Recorded:
    """One router's own choices in a pass, by microbatch."""

    def __init__(self) -> None:
        self.microbatch: int | None = None
        """As for Given."""
        self.experts: dict[int, Tensor] = {}
        """[tokens, k] of each microbatch that went forward."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Choose,
    ) -> tuple[Tensor, Tensor]:
        """The router's own choice."""
        values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.microbatch is not None:
            self.experts[self.microbatch] = experts.detach()
        return values, experts

    def require_all_taken(self, router: str) -> None:
        """Nothing: a record is as long as the pass."""
