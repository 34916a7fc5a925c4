"""Folders in published float8 (DeepSeek, Qwen), int4 (Kimi-K2) and mxfp4 (gpt-oss) form, with wide twins."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import Mxfp4Config

EDGE = 128
LINEAR = re.compile(
    r"(self_attn\.\w+_proj(_with_mqa)?|(gate|up|down)_proj|linear_attn\.(in_proj_(qkvz?|z)|out_proj))\.weight$"
    r"|\.experts\.((gate_up|down)_proj|\d+\.w[123]\.weight)$"
)
"""Qwen3-Next's and Qwen3.5's in_proj_ba, in_proj_b and in_proj_a stay wide."""


def publish(source: Path, published: Path, wide: Path, *, powers_of_two: bool = False) -> None:
    """Write both folders from one safetensors file; scales get their own file (ue8m0 if `powers_of_two`)."""
    values: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        values[name] = meant[name] = tensor
        if LINEAR.search(name):
            parts = [
                in_float8(part, powers_of_two=powers_of_two) for part in tensor.view(-1, *tensor.shape[-2:])
            ]
            stacked = [
                torch.stack(row).view(*tensor.shape[:-2], *row[0].shape) for row in zip(*parts, strict=True)
            ]
            values[name], scales[f"{name}_scale_inv"], meant[name] = stacked
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings |= {"weight_block_size": [EDGE, EDGE]} | ({"scale_fmt": "ue8m0"} if powers_of_two else {})
    for folder, written in ((wide, config), (published, config | {"quantization_config": settings})):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (folder / "config.json").write_text(json.dumps(written))
    save_file(meant, wide / "model.safetensors")
    save_file(values, published / "values.safetensors")
    save_file(scales, published / "scales.safetensors")
    files = dict.fromkeys(values, "values.safetensors") | dict.fromkeys(scales, "scales.safetensors")
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def in_float8(
    tensor: torch.Tensor, *, powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (values, scales, dequantised values) of a matrix."""
    edges = [-(-size // EDGE) for size in tensor.shape]
    values, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(edges)
    meant = torch.empty_like(tensor)
    for row, column in torch.cartesian_prod(*(torch.arange(n) for n in edges)).tolist():
        box = (slice(row * EDGE, (row + 1) * EDGE), slice(column * EDGE, (column + 1) * EDGE))
        scale = tensor[box].float().abs().max() / 448
        scales[row, column] = scale.log2().ceil().exp2() if powers_of_two else scale
        values[box] = (tensor[box].float() / scales[row, column]).to(torch.float8_e4m3fn)
        meant[box] = (values[box].float() * scales[row, column]).to(tensor.dtype)
    return values, scales, meant


INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"], "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
            "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
            "type": "int",
        },
    }},
}  # fmt: skip
"""Settings of Kimi-K2-Thinking."""


def publish_int4(source: Path, published: Path, wide: Path) -> None:
    """Write both folders, with the routed experts in compressed-tensors' int4, whose values count."""
    scheme = QuantizationScheme(**INT4["config_groups"]["group_0"])
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        wide_tensor = tensor if name.endswith("correction_bias") else tensor.bfloat16()
        if ".experts." not in name:
            stored[name] = meant[name] = wide_tensor
            continue
        scale = wide_tensor.unflatten(1, (-1, 32)).abs().amax(2) / 7.5
        compressed = PackedQuantizationCompressor.compress(
            {"weight": wide_tensor, "weight_scale": scale}, scheme
        )
        prefix = name.removesuffix("weight")
        stored |= {prefix + part: values for part, values in compressed.items()}
        meant[name] = PackedQuantizationCompressor.decompress(compressed, scheme)["weight"]
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    settings: dict[str, Any] = {"quantization_config": INT4}
    if "text_config" in config:  # Kimi-K2.5's are there
        settings = {"text_config": config["text_config"] | settings}
    for folder, written, tensors in ((wide, config, meant), (published, config | settings, stored)):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (folder / "config.json").write_text(json.dumps(written))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def publish_mxfp4(source: Path, published: Path, wide: Path) -> None:
    """Write both folders of gpt-oss with random experts and realistic scales; transformers' values count.

    (Its save_pretrained() of such a model omits the experts, in 5.19.)"""
    random, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=random, dtype=torch.uint8)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    for folder, written in ((wide, config), (published, config | {"quantization_config": settings})):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        published, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    meant = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(meant, wide / "model.safetensors", metadata={"format": "pt"})
