"""Write a distributed checkpoint of any layout as a Hugging Face folder, in one process.

Memory stays at one safetensors file. The folder has a temporary name until it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from mrl.errors import CheckpointError, ConfigError
from mrl.files import commit_folder, start_folder, sync, usual_mode, write_durably
from mrl.models import int4
from mrl.models.families import family_of
from mrl.models.family import EMBEDDING, Family
from mrl.models.folder_format import FolderFormat, FolderTensor
from mrl.models.hf_config import QUANTIZATION, HfConfig
from mrl.models.stored_names import VOCABULARY, StoredBox, has_draft_head, stored_boxes
from mrl.models.tensors import CheckpointTensor
from mrl.reward_labels import has_score
from mrl.training.checkpoint.reader import Copy, DistributedCheckpoint
from mrl.training.hf.adapted import AdaptedWeights
from mrl.training.hf.hf_folder import read_config, tensor_files
from mrl.training.hf.read_values import describe_tensors, read_whole
from mrl.training.hf.reward_model_folder import ABOUT, RewardFolder

log = logging.getLogger(__name__)
FILE_BYTES = 5_000_000_000
"""Largest safetensors file, unless one tensor is larger; the Hugging Face libraries' default."""
INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"
"""Folder where transformers stores a tokenizer's chat templates after the first."""
_SIDE_FILES = {"", ".json", ".jinja", ".model", ".spm", ".tiktoken", ".bpe", ".vocab", ".txt", ".md", ".py"}
"""Suffixes of tokenizers, chat templates, settings, code and texts; no suffix: licences and notices."""
_OF_OTHER_WEIGHTS = {
    "adapter_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "trainer_state.json",
}
"""Settings of adapters and quantisation, which readers would apply to the export, and of training."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFiles:
    """Tensors of a folder, by file."""

    tensors: dict[str, FolderTensor]
    carried: dict[str, Path]
    """Tensors copied from a source, with their scales -> the source's file."""
    no_drafts: str
    """Why the export has no draft heads; empty if it has the source's, or a source without any."""
    split: StateDictSplit

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.split.metadata["total_size"])

    @property
    def members(self) -> dict[str, list[FolderTensor]]:
        """File name -> its tensors."""
        files = self.split.filename_to_tensors
        return {file: [self.tensors[name] for name in names] for file, names in files.items()}


def plan_files(
    source: Path,
    hf_config: HfConfig,
    *,
    dtype: str,
    file_bytes: int = FILE_BYTES,
    trained_drafts: bool = False,
) -> ShardFiles:
    """Plan the files of an export in `dtype` (torch spelling) from config.json and tensor names in `source`,
    if any; with `trained_drafts` the checkpoint contains a draft head. Reads no weights. Raise ConfigError if
    the source lacks tensors that an export carries along."""
    family, stored = family_of(hf_config), _files_of(source)
    images = {name: file for name, file in stored.items() if name.startswith(family.copied_prefixes)}
    if "vision_config" in hf_config and not images:
        raise ConfigError(
            f"{source} has no tensors under {', '.join(family.copied_prefixes)}, which its config.json "
            "describes and an export carries along; download them again"
        )
    checkpoint = family.checkpoint_tensors(hf_config, dtype=dtype, drafts=trained_drafts)
    drafts, no_drafts = _drafts(family, hf_config, stored)
    if trained_drafts:
        trained = {name for tensor in checkpoint for name in FolderFormat.of(stored).stored_names(tensor)}
        drafts, no_drafts = {name: drafts[name] for name in drafts.keys() - trained}, ""
    copies = _copies_in_drafts(family, checkpoint, drafts)
    carried = images | {name: file for name, file in drafts.items() if name not in copies}
    folder_tensors = [
        *FolderFormat.of(stored).tensors(checkpoint),
        *FolderFormat().tensors(describe_tensors(carried, dtype)),
    ]
    tensors = {tensor.name: tensor for tensor in folder_tensors} | copies
    shapes = {name: _empty(tensor, device="meta") for name, tensor in tensors.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=file_bytes)
    return ShardFiles(tensors, carried, no_drafts, split)


def _drafts(family: Family, hf_config: HfConfig, stored: Mapping[str, Path]) -> tuple[dict[str, Path], str]:
    """Return the tensors of the source's draft heads that an export carries along, and why there are none
    (ShardFiles.no_drafts)."""
    prefixes = family.draft_prefixes(hf_config)
    drafts = {name: file for name, file in stored.items() if name.startswith(prefixes)}
    if drafts and has_score(hf_config):
        return {}, "a reward model has none"
    if any(name.endswith(int4.SUFFIXES) for name in drafts):
        return {}, "the source has them in int4, which an export does not have"
    described = any(hf_config.get(key) for key in family.without_drafts)
    if described and not drafts:
        return {}, f"its config.json has {', '.join(family.without_drafts)}, but its files have none"
    return drafts, ""


def _copies_in_drafts(
    family: Family, checkpoint: Sequence[CheckpointTensor], drafts: Iterable[str]
) -> dict[str, FolderTensor]:
    """Return those tensors of draft heads that are copies of the model's, which training changes."""
    model = {tensor.name: tensor for tensor in checkpoint}
    ends = {end: model.get(name, model[EMBEDDING]) for end, name in family.draft_copies.items()}
    return {
        name: FolderTensor(name, ((ends[end],),))
        for name in drafts
        for end in ends
        if name.endswith(f".{end}")
    }


def _files_of(source: Path) -> dict[str, Path]:
    """Return tensor_files() of a source, which may be without weights, because a checkpoint has them."""
    return tensor_files(source) if any(source.glob("*.safetensors*")) else {}


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    source: Path,
    dtype: str,
    file_bytes: int = FILE_BYTES,
    card: str | None = None,
    lora: Mapping[str, Any] | None = None,
    reward_model: RewardFolder | None = None,
) -> ShardFiles:
    """Write the policy of `checkpoint` and the side files of `source` to the new folder `out`.

    Args:
        dtype: Type of the exported weights.
        card: README.md, in place of the source's.
        lora: The manifest's description of adapters, which are merged into the source's weights.
        reward_model: Extra files of a checkpoint that is a reward model.

    Raises:
        CheckpointError: Checkpoint and source are of two models, or `out` exists.
    """
    added = dict(reward_model.config) if reward_model else {}
    hf_config = read_config(source) | added
    weights = weights_of(checkpoint, source, hf_config, lora)
    files = plan_files(
        source, hf_config, dtype=dtype, file_bytes=file_bytes, trained_drafts=weights.has_drafts
    )
    require_new(out)
    partial = start_folder(out)
    try:
        for name, tensors in files.members.items():
            _write_file(partial / name, tensors, weights, files.carried, getattr(torch, dtype))
        if files.split.is_sharded:
            index = {"metadata": files.split.metadata, "weight_map": files.split.tensor_to_filename}
            write_durably(partial / INDEX, json.dumps(index, indent=2).encode())
        if files.no_drafts:
            log.warning("%s: exported without draft heads: %s", source, files.no_drafts)
        changes = family_of(hf_config).without_drafts if files.no_drafts else {}
        copy_side_files(source, partial, dtype=dtype, changes=changes, added=added)
        if reward_model is not None:
            write_durably(partial / ABOUT, (json.dumps(reward_model.about, indent=2) + "\n").encode())
        if card is not None:
            write_durably(partial / "README.md", card.encode())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs its space back
        raise
    commit_folder(out)
    return files


class Weights(Protocol):
    """Source of checkpoint tensors for an export."""

    has_drafts: bool
    """True if they include a trained draft head's."""

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, by name."""
        ...


class CheckpointWeights:
    """Checkpoint with all weights."""

    def __init__(self, stored: DistributedCheckpoint, hf_config: HfConfig) -> None:
        """Raise CheckpointError unless both sides have the same tensors and shapes."""
        self._stored, self._copies = stored, plan_copies(stored, hf_config)
        self.has_drafts = has_draft_head(stored.shapes())

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors from the checkpoint's chunks."""
        self._stored.read((copy, values[name]) for name in values for copy in self._copies[name])


def weights_of(
    checkpoint: Path, source: Path, hf_config: HfConfig, lora: Mapping[str, Any] | None
) -> Weights:
    """Return a checkpoint's weights, merged from adapters with `lora`; raise CheckpointError if absent."""
    stored = DistributedCheckpoint(checkpoint)
    return (
        CheckpointWeights(stored, hf_config)
        if lora is None
        else AdaptedWeights(stored, source, hf_config, lora)
    )


def plan_copies(stored: DistributedCheckpoint, hf_config: HfConfig) -> dict[str, list[Copy]]:
    """Plan the copies into each tensor; CheckpointError unless both sides have equal tensors and shapes."""
    family, shapes = family_of(hf_config), stored.shapes()
    boxes = stored_boxes(family, hf_config, shapes)
    _require_same_elements(stored, shapes, boxes)
    return {name: [c for box in boxes[name] for c in stored.copies(box)] for name in boxes}


def _require_same_elements(
    stored: DistributedCheckpoint, shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, list[StoredBox]]
) -> None:
    """Raise CheckpointError if the boxes omit anything in the checkpoint but the vocabulary's padding."""
    used = dict.fromkeys(shapes, 0)
    for box in (box for members in boxes.values() for box in members):
        used[box.key] += math.prod(box.shape)
    for key, shape in shapes.items():
        padded = key in VOCABULARY and used[key] and shape[0] * shape[1] > used[key]
        if used[key] != math.prod(shape) and not padded:
            raise CheckpointError(
                f"{stored.folder} contains {key} {list(shape)}, but config.json describes {used[key]} "
                "elements of it; export with the folder of the same model"
            )


def _write_file(
    path: Path,
    tensors: Sequence[FolderTensor],
    weights: Weights,
    carried: Mapping[str, Path],
    dtype: torch.dtype,
) -> None:
    """Fill one file's tensors and write them. They are the only weights in memory, one of them twice if the
    folder stores it transposed (a stack of gpt-oss)."""
    trained = [tensor for tensor in tensors if tensor.name not in carried]
    values = {tensor.name: _empty(tensor) for tensor in trained}
    parts = [(k, part) for t in trained for k, part in t.split(values[t.name]).items()]
    first = dict(reversed(parts))
    weights.fill(first)
    for name, part in parts:
        if part is not first[name]:  # a copy in a draft head
            part.copy_(first[name])
    stored = {tensor.name: tensor.as_stored(values.pop(tensor.name)).contiguous() for tensor in trained}
    stored |= read_whole(carried, [t.name for t in tensors if t.name in carried], dtype)
    try:
        with usual_mode(path):
            save_file(stored, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    sync(path)


def _empty(tensor: FolderTensor, device: str = "cpu") -> torch.Tensor:
    return torch.empty(tensor.filled_shape, dtype=getattr(torch, tensor.dtype), device=device)


def require_new(path: Path) -> None:
    """Raise CheckpointError if `path` exists."""
    if path.exists():
        raise CheckpointError(f"{path} already exists; export to a new folder or remove it first")


def copy_side_files(
    source: Path,
    folder: Path,
    *,
    dtype: str,
    changes: Mapping[str, Any],
    added: Mapping[str, Any] | None = None,
) -> None:
    """Copy the source's tokenizer, chat templates, settings, code and texts. Other files belong to other
    weights. config.json gets the type, `changes` of keys that it has, and all of `added`."""
    for file in sorted((*source.iterdir(), *source.glob(f"{TEMPLATES}/*.jinja"))):
        if file.is_file() and _belongs(file):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)  # with the permissions of a new file
    text = (source / "config.json").read_text()
    config = json.loads(text)
    exported = _changed(config, changes) | {"torch_dtype" if "torch_dtype" in config else "dtype": dtype}
    exported |= added or {}
    exported.pop(QUANTIZATION, None)  # written weights are wide, whatever was read
    if text_config := config.get("text_config"):
        exported["text_config"] = _changed(text_config, {"torch_dtype": dtype, "dtype": dtype, **changes})
    if exported != config:
        text = json.dumps(exported, indent=2) + "\n"
    write_durably(folder / "config.json", text.encode())


def _belongs(file: Path) -> bool:
    """Return True if an export copies this file of its source."""
    if file.name.startswith(".") or file.name == "config.json" or file.name in _OF_OTHER_WEIGHTS:
        return False
    return file.suffix.lower() in _SIDE_FILES and not file.name.endswith(".index.json")


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with new values of those keys of `changes` that it has."""
    return config | {name: value for name, value in changes.items() if name in config}
