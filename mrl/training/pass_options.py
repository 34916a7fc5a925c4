"""What a pass over a model is asked for, handed on whole from the driver to the rank that runs it."""

from __future__ import annotations

import dataclasses

from mrl.samples import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Which model a pass runs, and what it returns.

    The learner makes it, for it knows the run's settings. worker.py and passes.py read it; layers between hand it on.
    """

    role: Role = "policy"
    temperature: float = 1.0
    """The sampling temperature, which divides logits."""
    with_router_margins: bool = False
    """Return `router_margin` [N] too: the smallest gap in a router's choice, over all layers and the prefix."""
    record_routes: bool = False
    """Let routers choose, whatever routes the batch brings; return `routes` [N, layers, k] too (mrl/routes.py)."""
    with_reference: bool = False
    """Return the reference's `ref_logprobs` [N] too, with the policy's own."""


DEFAULTS = PassOptions()
"""The policy at temperature 1, without anything besides."""
