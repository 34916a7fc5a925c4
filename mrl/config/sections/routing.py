"""Which experts a trained token visits."""

from typing import Literal

from mrl.section import Section


class RoutingSection(Section):
    """Whose choice of experts the trainer takes."""

    replay: Literal["off", "trainer", "engine"] = "off"
    """off: each pass chooses by its own scores. trainer: a step's updates, and the reference, take the choices of the pass
    for old log-probs (R2, arXiv 2507.18071). engine: every pass of policy and reference takes those that the engine sampled
    with (R3, arXiv 2510.11370). Weights are always those of today's scores; a critic chooses by itself."""
