"""Check and config.json overrides of an engine with quantised weights, from config.json before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl.config.sections.rollout import RolloutSection
from mrl.errors import ConfigError, WeightSyncError
from mrl.models.engine_rows import EngineRows, Shard
from mrl.models.families import family_of
from mrl.models.folder_format import FolderFormat
from mrl.models.hf_config import COMPRESSED, FP8, MXFP4, QUANTIZATION, language_model, stored_method
from mrl.models.tensors import TRAINER
from mrl.resharding.planner import quantised
from mrl.resharding.planner.manifest import RankManifest
from mrl.training.hf.hf_folder import tensor_files


def quantised_overrides(
    rollout: RolloutSection, model_path: str, *, on_cpu: bool, real_weights: bool
) -> dict[str, Any]:
    """Return vLLM's overrides of config.json; ConfigError if model, split or machine cannot do it."""
    hf = language_model(json.loads((Path(model_path) / "config.json").read_text()))
    if rollout.quantization == "none":
        if real_weights and on_cpu:
            _require_cpu_kernel(hf, model_path)
        return _as_stored(hf, model_path) if real_weights else _wide(hf)
    if real_weights:
        raise ConfigError(
            f"rollout.quantization = {rollout.quantization}: weights are quantised at a weight sync, but "
            f"here they are read from {model_path}; set it to none"
        )
    require_whole_blocks(hf, rollout)
    return {QUANTIZATION: quantised.engine_settings(hf["num_hidden_layers"])}


def _as_stored(hf: dict[str, Any], model_path: str) -> dict[str, Any]:
    """Return the overrides of an engine that reads the folder's weights as stored. The folder's tensors show
    which modules are wide: some float8 folders do not list them, above all routers."""
    if stored_method(hf) != FP8:
        return {}
    form = FolderFormat.of(tensor_files(model_path))
    wide = [
        tensor.name.removesuffix(".weight")
        for tensor in family_of(hf).checkpoint_tensors(hf)
        if tensor.name.endswith(".weight") and form.name(tensor.name) not in form.float8
    ]
    return {
        QUANTIZATION: quantised.engine_settings(hf["num_hidden_layers"]) | {"modules_to_not_convert": wide}
    }


def _wide(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides of an engine that will receive wide weights, whatever the folder contains. vLLM's
    gpt-oss reads the method if config.json has the key; an empty method is none."""
    if not (method := stored_method(hf)):
        return {}
    return {QUANTIZATION: {"quant_method": ""} if method == MXFP4 else None}


def _require_cpu_kernel(hf: dict[str, Any], model_path: str) -> None:
    """Raise ConfigError if vLLM has no kernel on this CPU for the folder's stored weights."""
    import torch

    served_by = {
        MXFP4: ("CPUs with AMX, which this machine lacks", torch.cpu._is_amx_tile_supported()),
        COMPRESSED: (
            "GPUs",
            False,
        ),  # of experts: "No WNA16 MoE backend supports the deployment configuration"
    }
    where, here = served_by.get(stored_method(hf), ("", True))
    if not here:
        raise ConfigError(
            f"{model_path} contains {stored_method(hf)} weights, which vLLM serves as they are only on "
            f"{where}; evaluate an export (mrl export writes wide weights), or use a GPU"
        )


def require_whole_blocks(hf: dict[str, Any], rollout: RolloutSection) -> None:
    """Raise ConfigError if quantised and rollout.tp splits a block, experts are stacked or a delta net
    exists."""
    if rollout.quantization == "none":
        return
    family = family_of(hf)
    if family.num_delta_nets(hf):
        raise ConfigError(
            f"rollout.quantization = {rollout.quantization}: delta nets are served wide only; set it to none"
        )
    kinds = {family.is_moe_layer(hf, number): number for number in range(hf["num_hidden_layers"])}
    experts = range(family.num_experts(hf))
    if any(row.stack for number in kinds.values() for row in family.layer(hf, number, TRAINER, experts)):
        raise ConfigError(
            f"rollout.quantization = {rollout.quantization}: the experts of {hf['model_type']} are stacked, "
            "and weight syncs do not quantise stacked tensors; set it to none"
        )
    for rank in range(rollout.tp):
        engine = EngineRows(Shard(rollout.tp, rank, rollout.ep, rank % rollout.ep), "bfloat16")
        tensors = [tensor for number in kinds.values() for tensor in family.engine_layer(hf, number, engine)]
        try:
            quantised.quantised_manifest(RankManifest.of(rank, tensors))
        except WeightSyncError as error:
            advice = "lower rollout.tp" if rollout.tp > 1 else "the model is too narrow, set it to none"
            raise ConfigError(
                f"rollout.quantization = {rollout.quantization} at rollout.tp = {rollout.tp}: "
                f"{error}; {advice}"
            ) from error
