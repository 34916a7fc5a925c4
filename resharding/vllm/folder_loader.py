"""Let an engine read a folder's weights itself, by vLLM's own loader, without tensors that are not served.

vLLM's text model classes fail on unknown tensors, and a folder may also contain an image model.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from vllm.config.utils import replace
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mrl.models.families import family_of
from mrl.models.folder_format import FolderFormat
from mrl.training.hf.hf_folder import read_config, tensor_files

LOAD_FORMAT = "mrl"
"""Name of the loader in vLLM's LoadConfig."""


@register_model_loader(LOAD_FORMAT)
class FolderLoader(DefaultModelLoader):
    """vLLM's loader for a folder of any format ("auto")."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield (name, tensor) of the text model, without the tensors that are carried along unserved."""
        hf = read_config(model_config.model)
        family, form = family_of(hf), FolderFormat.of(tensor_files(model_config.model))
        turned = {t.name: t for t in form.tensors(family.checkpoint_tensors(hf)) if t.turned}
        for name, tensor in super().get_all_weights(model_config, model):
            if name in turned:  # which vLLM's text classes do not read
                yield from turned[name].split(tensor).items()
            elif not name.startswith(family.copied_prefixes):
                yield form.text_name(name), tensor
