"""Write a Hugging Face folder from a GGUF file, and a mixture of experts from a dense model.

Sparse upcycling (arXiv 2212.05055): every expert starts as a copy of the dense model's MLP, and the router is
random. The weights of the chosen experts add up to 1, so the new model computes the dense model's function
until training makes its experts differ.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.files import commit_folder, share_weights, start_folder, sync, usual_mode, write_durably
from mrl.models.families import FAMILIES, require_trainable

PARTS = ("gate", "up", "down")
"""Projections of a gated MLP."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoeForm:
    """Family whose names and config.json describe a dense model as a mixture of experts."""

    model_type: str
    architecture: str
    count_key: str
    """Key of config.json with the number of experts."""
    width_key: str
    """Key of config.json with an expert's width."""
    added: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More keys: the weights of the chosen experts add up to 1, and every layer has experts."""
    dropped: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the dense family only, with the value that the other family's code implies."""


FORMS = {
    "llama": MoeForm(
        "mixtral",
        "MixtralForCausalLM",
        count_key="num_local_experts",
        width_key="intermediate_size",
        added={"sliding_window": None},
        dropped={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "qwen3": MoeForm(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        count_key="num_experts",
        width_key="moe_intermediate_size",
        added={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
"""model_type of a dense model -> its form as a mixture of experts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Upcycling:
    """Experts and router to make of a dense model.

    Attributes:
        num_experts: Experts of every layer.
        experts_per_token: Experts that compute each token, at most `num_experts`.
        noise: `noise * std * N(0, 1)` is added to each expert's weights; `std`: the dense tensor's standard
            deviation. 0 keeps the dense model's function.
        router_std: Standard deviation of the router's normal distribution; transformers starts with 0.02.
        seed: Seed of both.
    """

    num_experts: int
    experts_per_token: int = 2
    noise: float = 0.0
    router_std: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise ConfigError(f"--experts {self.num_experts} must be at least 2")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"--per-token {self.experts_per_token} must be 1 to {self.num_experts} (--experts)"
            )
        if self.noise < 0 or self.router_std <= 0:
            raise ConfigError("--noise must be at least 0, and --router-std above 0")


def convert_model(source: Path, out: Path, upcycling: Upcycling | None = None) -> int:
    """Write the model of `source`, a GGUF file or a dense Hugging Face folder, to the new folder `out`.

    Args:
        source: A `.gguf` file, or a folder with `upcycling`.
        out: A folder that does not exist; it appears when it is complete.
        upcycling: Experts to write; None keeps the model dense.

    Returns:
        Number of parameters in `out`.

    Raises:
        ConfigError: `out` exists, the source cannot be read, or its family cannot be trained or upcycled.
    """
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name a new folder or remove it first")
    if source.suffix != ".gguf":
        if upcycling is None:
            raise ConfigError(f"{source} is not a .gguf file; a folder is only converted with --experts")
        return _upcycle(source, out, upcycling)
    if not source.is_file():
        raise ConfigError(f"{source} is not a file")
    if upcycling is None:
        return _write(out, lambda partial: _read_gguf(source, partial))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=out.parent) as dense:
        _read_gguf(source, Path(dense))
        return _upcycle(Path(dense), out, upcycling)


def _write(out: Path, fill: Callable[[Path], int]) -> int:
    """Call `fill(partial)` for the folder that becomes `out`; return what it returns."""
    partial = start_folder(out)
    try:
        count = fill(partial)
        require_trainable(json.loads((partial / "config.json").read_text()))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    commit_folder(out)
    return count


def _read_gguf(file: Path, folder: Path) -> int:
    """Write a GGUF file's weights (float32), tokenizer and chat template to an existing folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    where: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = transformers.AutoConfig.from_pretrained(**where)
        vars(config).pop("_model_name_or_path", None)
        width = _gguf_field(file, f"{config.model_type}.attention.key_length")
        if width is not None:  # transformers ignores it and assumes the family's usual width
            config.head_dim = width
        require_trainable(config.to_dict())
        pair: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=torch.float32, output_loading_info=True
        )
        model, loaded = pair
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise ConfigError(
            f"GGUF files are read with gguf and accelerate: pip install 'mrl[gguf]' ({error})"
        ) from error
    except (ValueError, OSError, KeyError, IndexError, RuntimeError) as error:
        raise ConfigError(f"{file} cannot be read as a model: {error}") from error
    if loaded["missing_keys"]:
        raise ConfigError(
            f"{file} lacks weights of {config.model_type}: {', '.join(sorted(loaded['missing_keys']))}"
        )
    # transformers does not save a model that was loaded from a quantised file: copy its weights.
    with torch.device("meta"):
        wide = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wide.load_state_dict(model.state_dict(), assign=True)
    wide.tie_weights()
    wide.generation_config = model.generation_config
    wide.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    share_weights(folder)
    return sum(tensor.numel() for tensor in wide.parameters())


def _gguf_field(file: Path, name: str) -> Any:
    """Return the value of a field of a GGUF file's header; None if it has no such field."""
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get(name)
    return None if field is None else field.contents()


def _upcycle(source: Path, out: Path, options: Upcycling) -> int:
    from mrl.training.hf.hf_folder import read_config

    config = read_config(source)
    form = FORMS.get(config.get("model_type", ""))
    if form is None:
        raise ConfigError(
            f"{source} has model_type {config.get('model_type')!r}; only {sorted(FORMS)} "
            "can become a mixture of experts"
        )
    for key, implied in form.dropped.items():
        if config.get(key, implied) != implied:
            raise ConfigError(f"{source}: {key} = {config[key]!r}, which {form.model_type} does not have")
    if "quantization_config" in config:
        raise ConfigError(f"{source} is quantised; upcycle the unquantised model")
    return _write(out, lambda partial: _write_experts(source, partial, config, form, options))


def _write_experts(
    source: Path, folder: Path, config: Mapping[str, Any], form: MoeForm, options: Upcycling
) -> int:
    """Write the upcycled model, one file per layer, with one layer of it in memory; return its parameters."""
    from safetensors.torch import save_file

    from mrl.training.hf.export_folder import INDEX, copy_side_files
    from mrl.training.hf.hf_folder import tensor_files
    from mrl.training.hf.read_values import read_whole

    groups: dict[int, dict[str, Path]] = defaultdict(dict)
    for name, file in tensor_files(source).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        groups[layer][name] = file
    weight_map: dict[str, str] = {}
    num_parameters = num_bytes = 0
    for index, layer in enumerate(sorted(groups), start=1):
        dense = read_whole(groups[layer])
        tensors = dense if layer < 0 else dict(_layer(dense, layer, form, options))
        path = folder / f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        with usual_mode(path):
            save_file(tensors, path, metadata={"format": "pt"})
        sync(path)
        weight_map |= dict.fromkeys(tensors, path.name)
        num_parameters += sum(tensor.numel() for tensor in tensors.values())
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    write_durably(folder / INDEX, json.dumps(content, indent=2).encode())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    copy_side_files(source, folder, dtype=dtype, changes={})
    experts = {
        "model_type": form.model_type,
        "architectures": [form.architecture],
        form.count_key: options.num_experts,
        "num_experts_per_tok": options.experts_per_token,
        form.width_key: config["intermediate_size"],
        **form.added,
    }
    kept = {key: value for key, value in config.items() if key not in form.dropped}
    write_durably(folder / "config.json", (json.dumps(kept | experts, indent=2) + "\n").encode())
    return num_parameters


def _layer(
    dense: Mapping[str, Any], layer: int, form: MoeForm, options: Upcycling
) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors of one layer of the new model, random by seed and layer only."""
    import torch

    random = torch.Generator().manual_seed(options.seed * 1_000_003 + layer)
    family, prefix = FAMILIES[form.model_type], f"model.layers.{layer}"
    parts = {f"{prefix}.mlp.{part}_proj.weight": part for part in PARTS}
    yield from ((name, tensor) for name, tensor in dense.items() if name not in parts)
    like = dense[f"{prefix}.mlp.gate_proj.weight"]
    router = torch.randn(options.num_experts, like.shape[1], generator=random) * options.router_std
    yield f"{prefix}.{family.moe_module}.gate.weight", router.to(like.dtype)
    for expert in range(options.num_experts):
        for name, part in parts.items():
            copy = dense[name].clone()
            if options.noise:
                drawn = torch.randn(copy.shape, generator=random)
                copy = (copy + options.noise * copy.float().std() * drawn).to(copy.dtype)
            yield family.expert_name(prefix, expert, part), copy
