"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783) and Mistral (arXiv 2310.06825): grouped-query attention and
gated MLPs without biases."""

from __future__ import annotations

from mrl.models.family import Family


class Llama(Family):
    """Llama 2, 3, 3.1, 3.2 (text) and 3.3."""

    model_type = "llama"
    implemented = {"mlp_bias": (None, False)}
    rope_kinds = ("default", "llama3", "yarn")


class Mistral(Family):
    """Mistral 7B from v0.2 on, Mistral Nemo and Mistral Small 3 as text models: without windows."""

    model_type = "mistral"
    implemented = {"sliding_window": (None,)}
