"""Options of a pass over a model, passed unchanged from the driver to the rank that runs it."""

from __future__ import annotations

import dataclasses

from mrl.samples import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Which model a pass runs, and what it returns. The learner creates it from the run's settings. worker.py
    and passes.py read it; layers between pass it on."""

    role: Role = "policy"
    temperature: float = 1.0
    """Sampling temperature, which divides logits."""
    with_router_margins: bool = False
    """Also return `router_margin` [N]: smallest gap in a router's choice, over all layers and the prefix."""
    record_routes: bool = False
    """Let routers choose, even with routes in the batch; also return `routes` [N, layers, k]."""
    with_reference: bool = False
    """Also return the reference's `ref_logprobs` [N]."""


DEFAULTS = PassOptions()
"""The policy at temperature 1, without extras."""
