"""Settings of routing replay: which experts a trained token visits."""

from typing import Literal

from mrl.section import Section


class RoutingSection(Section):
    """Source of the experts that the trainer uses."""

    replay: Literal["off", "trainer", "engine"] = "off"
    """Let each pass choose experts itself (off); replay those of the pass for old log-probs in a step's
    updates and the reference (trainer: R2, arXiv 2507.18071); or replay the engine's in every pass of policy
    and reference (engine: R3, arXiv 2510.11370). Weights always come from the current router scores; a critic
    always chooses itself."""
