"""How an engine reads a folder's weights itself: by vLLM's own loader, without the tensors that nobody
serves.

vLLM's class of a model of text stops at a tensor that it does not know, and a folder may hold a model of
images beside.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from vllm.config.utils import replace
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mrl.models.families import family_of
from mrl.training.hf.hf_folder import read_config

LOAD_FORMAT = "mrl"
"""The loader's name in vLLM's LoadConfig."""


@register_model_loader(LOAD_FORMAT)
class FolderLoader(DefaultModelLoader):
    """vLLM's loader of a folder in whichever format it has ("auto")."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """(name, tensor) of what the family does not carry along unserved."""
        carried = family_of(read_config(model_config.model)).carried
        for name, tensor in super().get_all_weights(model_config, model):
            if not name.startswith(carried):
                yield name, tensor
