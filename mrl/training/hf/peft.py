"""Write a checkpoint of adapters as a folder of the PEFT library.

Format: adapter_config.json, and adapter_model.safetensors with lora_A [rank, columns] and lora_B [rows, rank]
of every changed module under base_model.model (PEFT's documentation, "PEFT checkpoint format").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mrl.files import commit_folder, start_folder, sync, usual_mode, write_durably
from mrl.models.adapters import lora_a_name, lora_b_name
from mrl.training.hf.adapted import AdaptedWeights
from mrl.training.hf.export_folder import require_new

PREFIX = "base_model.model."


def export_adapter(weights: AdaptedWeights, out: Path, *, base: str, dtype: str, tensors: list[str]) -> int:
    """Write the new folder `out`; return the bytes of its tensors. `base` is the folder without adapters, for
    readers of `out`; `tensors` are all its tensor names."""
    require_new(out)
    partial = start_folder(out)
    halves = weights.read({half for pair in weights.changed.values() for half in pair}, getattr(torch, dtype))
    values = {}
    for tensor, (a, b) in weights.changed.items():
        # q, k and v share one A, but a file contains no tensor twice
        values[PREFIX + lora_a_name(tensor)] = halves[a].clone()
        values[PREFIX + lora_b_name(tensor)] = halves[b]
    with usual_mode(partial / "adapter_model.safetensors"):
        save_file(values, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    sync(partial / "adapter_model.safetensors")
    config = _config(weights, base, tensors)
    write_durably(partial / "adapter_config.json", json.dumps(config, indent=2).encode())
    commit_folder(out)
    return sum(value.nbytes for value in values.values())


def _config(weights: AdaptedWeights, base: str, tensors: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": target_modules(list(weights.changed), tensors),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
    }


def target_modules(changed: list[str], tensors: list[str]) -> list[str]:
    """Return the last parts of the changed modules' names; whole names if an unchanged module ends alike.

    >>> target_modules(["m.0.q_proj.weight"], ["m.0.q_proj.weight", "m.1.q_proj.weight", "m.0.k_proj.weight"])
    ['m.0.q_proj']
    """
    modules = {name.removesuffix(".weight") for name in changed}
    others = {name.removesuffix(".weight").rpartition(".")[2] for name in tensors if name not in set(changed)}
    last = {module.rpartition(".")[2] for module in modules}
    return sorted(modules if last & others else last)
