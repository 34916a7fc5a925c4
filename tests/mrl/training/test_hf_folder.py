"""Folders in and out without an engine: the ranks of every layout load pieces that make up the folder."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.errors import CheckpointError, ConfigError
from mrl.models.families import family_of, require_trainable
from mrl.models.layout import Layout
from mrl.training.hf import export_folder, hf_folder
from mrl.training.hf import read_values as hf_values
from tests.published import publish, publish_int4, publish_mxfp4
from tests.support.image_folders import unpack_experts
from tests.tiny_models import write_model

LAYOUTS = [
    Layout(),
    Layout(tp=2, ep=4, dp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=4, etp=2, ep=2, pp=2),
    Layout(pp=4, ep=2, dp=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "moe", dtype=torch.bfloat16)


def load_all(folder: Path, layout: Layout) -> dict[tuple[int, int, str], torch.Tensor]:
    """Return (rank, chunk, parameter) -> the tensor that this rank would load."""
    config = hf_folder.read_config(folder)
    family = family_of(config)
    files = hf_folder.tensor_files(folder)
    expected = family.checkpoint_tensors(config)
    loaded = {}
    for place in layout.all_coordinates():
        targets = [
            (local, torch.full(local.shape, 7.0, dtype=torch.bfloat16))
            for local in family.local_tensors(config, layout, place)
        ]
        hf_values.load_pieces(targets, files, expected)
        loaded |= {(place.rank, local.chunk, local.name): tensor for local, tensor in targets}
    return loaded


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces_of_all_ranks_make_the_folder_again(layout: Layout, folder: Path) -> None:
    config = hf_folder.read_config(folder)
    family, loaded = family_of(config), load_all(folder, layout)
    again = {
        tensor.name: torch.full(tensor.shape, float("nan"), dtype=torch.bfloat16)
        for tensor in family.checkpoint_tensors(config)
    }
    for place in layout.all_coordinates():
        for local in family.local_tensors(config, layout, place):
            for box in local.pieces:
                value = hf_values.box(loaded[place.rank, local.chunk, local.name], box.local_start, box.shape)
                target = hf_values.box(again[box.tensor], box.start, box.shape)
                assert target.isnan().all() or torch.equal(target, value), f"{box} of {place} differs"
                target.copy_(value)
    original = load_file(folder / "model.safetensors")
    assert again.keys() == original.keys()
    assert all(torch.equal(again[n].view(torch.int16), original[n].view(torch.int16)) for n in original)


def test_sharded_and_single_folders_load_the_same(folder: Path, tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(set(hf_folder.tensor_files(tmp_path).values())) == 3
    single, sharded = load_all(folder, LAYOUTS[1]), load_all(tmp_path, LAYOUTS[1])
    assert all(torch.equal(single[key], sharded[key]) for key in single)


def test_a_file_is_looked_for_once_however_many_tensors_it_has(folder, tmp_path, monkeypatch) -> None:
    """Each rank looks on a shared file system: DeepSeek-V3 has 163 files and 91,000 tensors."""
    for part in ("one", "two"):
        (tmp_path / f"{part}.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    names = sorted(hf_folder.tensor_files(folder))
    parts = {name: f"{('one', 'two')[place % 2]}.safetensors" for place, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    looked, is_file = Counter[str](), Path.is_file

    def counted(path: Path) -> bool:
        looked[path.name] += 1
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", counted)
    config = hf_folder.read_config(tmp_path)
    hf_folder.check_folder(tmp_path, family_of(config), config)
    assert looked["one.safetensors"] == looked["two.safetensors"] == 1 and len(names) > 40


def test_padding_of_the_vocabulary_is_zero(folder: Path) -> None:
    loaded = load_all(folder, Layout(tp=4))
    last = loaded[3, 0, "embedding.word_embeddings.weight"]
    assert last.shape[0] * 4 == 132
    assert (last[-1] == 0).all() and (last[-2] != 0).any()


@pytest.fixture
def spoiled(folder: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a folder without weights, and tensors to write there."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path, load_file(folder / "model.safetensors")


def check(folder: Path) -> None:
    """Run the checks that come before a run starts."""
    config = hf_folder.read_config(folder)
    hf_folder.check_folder(folder, family_of(config), config)


def load(folder: Path) -> None:
    load_all(folder, Layout())


Readers = tuple[Callable[[Path], None], ...]
BOTH: Readers = (check, load)


def test_a_missing_tensor_is_named(spoiled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = spoiled
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of .*experts\.5\.up_proj"):
        check(path)


def test_an_unknown_tensor_is_named(spoiled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = spoiled
    save_file(tensors | {"model.surprise": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unknown to the model, first \['model\.surprise'\]"):
        check(path)


def test_a_tensor_of_another_shape_is_named(spoiled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = spoiled
    tensors["model.norm.weight"] = torch.zeros(47)
    save_file(tensors, path / "model.safetensors")
    for read in BOTH:
        with pytest.raises(
            ConfigError, match=r"model\.norm\.weight .* is \[47\], but config\.json says \[48\]"
        ):
            read(path)


def test_a_tensor_that_is_not_where_the_index_says_is_named(spoiled) -> None:
    path, tensors = spoiled
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")})
    )
    del tensors["model.norm.weight"]
    save_file(tensors, path / "part.safetensors")
    with pytest.raises(
        ConfigError, match=r"part\.safetensors lacks 1 of .* index, first \['model\.norm\.weight'\]"
    ):
        check(path)


def changed(folder: Path, layout: Layout) -> tuple[int, set[str]]:
    """Count and name parameters that differ between `wide` and `source`; `published` must load as `wide`."""
    require_trainable(hf_folder.read_config(folder / "published"))
    check(folder / "published")
    published, wide, source = (load_all(folder / name, layout) for name in ("published", "wide", "source"))
    assert published.keys() == wide.keys()
    assert all(torch.equal(published[key], wide[key]) for key in wide)
    names = [name for (*place, name), tensor in wide.items() if not torch.equal(source[*place, name], tensor)]
    return len(names), set(names)


LATENT: dict[str, Any] = {"hidden_size": 320, "moe_intermediate_size": 192}
WIDTHS: dict[str, Any] = LATENT | {"intermediate_size": 192, "head_dim": 48}
"""Tensors of one, two and three blocks, whole and not; tensor parallelism cuts inside them."""
MINIMAX: dict[str, Any] = {"hidden_size": 320, "intermediate_size": 192, "head_dim": 48}
DELTA_NETS: dict[str, Any] = WIDTHS | {"linear_key_head_dim": 40, "linear_value_head_dim": 56}
"""Key heads begin inside blocks, of merged projections too."""
SHARED: dict[str, Any] = DELTA_NETS | {"shared_expert_intermediate_size": 192}


@pytest.mark.parametrize(("family", "widths", "layout", "form"), [
    ("qwen3_moe", WIDTHS, Layout(), ""),
    ("qwen3_moe", WIDTHS, Layout(tp=4, etp=2, ep=2, pp=2), ""),
    ("deepseek_v3", LATENT, Layout(tp=2, ep=2), ""),
    ("deepseek_v3", LATENT, Layout(tp=2, ep=2), "powers of two"),
    ("kimi_k2", LATENT, Layout(pp=2, ep=2, dp=2), ""),
    ("kimi_k25", LATENT, Layout(pp=2, ep=2, dp=2), ""),
    ("minimax_m2", MINIMAX, Layout(tp=2, ep=2), ""),
    ("qwen3_vl_moe", WIDTHS, Layout(tp=2, etp=2, ep=2, pp=2, dp=2), ""),
    ("qwen3_next", SHARED, Layout(), "each expert"),
    ("qwen3_next", SHARED, Layout(tp=2, pp=2, ep=2), "each expert"),
    ("qwen3_5", DELTA_NETS, Layout(tp=2), "each expert"),
    ("qwen3_5_moe", SHARED, Layout(tp=2, etp=2, ep=2, pp=2, dp=2), "each expert"),
    ("qwen3_5_moe", SHARED, Layout(tp=2, etp=2, ep=2, pp=2, dp=2), ""),
], ids=str)  # fmt: skip
def test_published_float8_weights_load_as_what_they_mean(family, widths, layout, form, tmp_path) -> None:
    """Qwen3.5's experts are separate, as in its FP8 folders, or stacked as in wide ones; no draft layers."""
    source = write_model(tmp_path / "source", family, dtype=torch.bfloat16, **widths)
    if form == "each expert":
        unpack_experts(source)
    if "linear_key_head_dim" in widths:
        draft = {"mtp.layers.0.mlp.down_proj.weight": torch.ones(48, 48)}
        save_file(load_file(source / "model.safetensors") | draft, source / "model.safetensors")
    publish(source, tmp_path / "published", tmp_path / "wide", powers_of_two=form == "powers of two")
    assert changed(tmp_path, layout)[0] > len(load_all(source, layout)) / 4


@pytest.mark.parametrize(("change", "named", "readers"), [
    ({"in_proj_qkvz.weight_scale_inv": None},
     r"in_proj_qkvz\.weight in .* is F8_E4M3, but the folder lacks .*_inv", BOTH),
    ({"in_proj_qkvz.weight": None}, r"lacks 1 of .*in_proj_qkvz\.weight'", (check,)),
    ({"in_proj_qkvz.weight_scale_inv": torch.ones(4, 3)},
     r"qkvz\.weight_scale_inv in .* is \[4, 3\], .* says \[5, 3\]", BOTH),
    ({"in_proj_ba.weight_scale_inv": torch.ones(1, 3)},
     r"in_proj_ba\.weight in .* is BF16, but the folder has .*_inv", BOTH),
    ({"in_proj.weight_scale_inv": torch.ones(1, 3)},
     r"unknown to the model, first .*in_proj\.weight_scale_inv'", (check,)),
])  # fmt: skip
def test_broken_float8_weights_are_named(change, named, readers, tmp_path) -> None:
    source = write_model(tmp_path / "source", "qwen3_next", dtype=torch.bfloat16, **DELTA_NETS)
    publish(source, tmp_path / "published", tmp_path / "wide")
    tensors = hf_values.read_whole(hf_folder.tensor_files(tmp_path / "published"))
    (tmp_path / "published" / "model.safetensors.index.json").unlink()
    for name, values in change.items():
        tensors.pop(f"model.layers.0.linear_attn.{name}", None)
        tensors |= {} if values is None else {f"model.layers.0.linear_attn.{name}": values}
    save_file(tensors, tmp_path / "published" / "model.safetensors")
    for read in readers:
        with pytest.raises(ConfigError, match=named):
            read(tmp_path / "published")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return int4_of("kimi_k2", tmp_path_factory)


@pytest.fixture(scope="module")
def int4_beside_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return int4_of("kimi_k25", tmp_path_factory)


def int4_of(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `published` and `wide`."""
    folder = tmp_path_factory.mktemp("int4")
    source = write_model(
        folder / "source", family, dtype=torch.bfloat16, hidden_size=320, moe_intermediate_size=192
    )
    publish_int4(source, folder / "published", folder / "wide")
    return folder


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    source = write_model(folder / "source", "gpt_oss", hidden_size=64, intermediate_size=96)
    publish_mxfp4(source, folder / "published", folder / "wide")
    return folder


@pytest.mark.parametrize(("form", "layout"), [
    ("int4", Layout()),
    ("int4", Layout(tp=4, etp=2, ep=2, pp=2)),
    ("int4_beside_images", Layout(tp=4, etp=2, ep=2, pp=2)),
    ("mxfp4", Layout()),
    ("mxfp4", Layout(tp=2, pp=2, ep=4, dp=2)),
], ids=str)  # fmt: skip
def test_published_experts_of_four_bits_load_as_their_libraries_read_them(form, layout, request) -> None:
    _, names = changed(request.getfixturevalue(form), layout)
    assert names and all(".experts." in name for name in names)


@pytest.mark.parametrize(("form", "name", "boxes"), [
    ("int4", "5.down_proj.weight",
     [((7, 5), (150, 40)), ((3, 64), (1, 32)), ((0, 33), (320, 1)), ((0, 0), (320, 192))]),
    ("mxfp4", "down_proj", [((70, 5), (150, 40)), ((3, 64), (1, 32)), ((0, 0), (8 * 64, 96))]),
], ids=["int4", "mxfp4"])  # fmt: skip
def test_any_box_of_them_is_read(form, name, boxes, request) -> None:
    """Read columns inside a group, one group, one row, and rows of several experts."""
    folder = request.getfixturevalue(form)
    config = hf_folder.read_config(folder / "published")
    named = [(f"model.layers.1.mlp.experts.{name}", box) for box in boxes]
    published, wide = (
        dict(hf_values.read_boxes(folder / kind, family_of(config), config, torch.bfloat16, named))
        for kind in ("published", "wide")
    )
    assert [published[n].shape for n in range(len(boxes))] == [shape for _, shape in boxes]
    assert all(torch.equal(published[n], wide[n]) for n in range(len(boxes)))


@pytest.mark.parametrize(("part", "values", "named", "readers"), [
    ("scale", None, r"lacks 1 of .*experts\.3\.up_proj\.weight_scale'", (check,)),
    ("packed", None, r"lacks 1 of .*experts\.3\.up_proj\.weight'", (check,)),
    ("scale", torch.ones(192, 5),
     r"weight_scale in .* is \[192, 5\], but config\.json says \[192, 10\]", BOTH),
    ("packed", torch.ones(192, 80, dtype=torch.int32),
     r"weight_packed in .* is \[192, 80\], .* says \[192, 40\]", BOTH),
    ("shape", torch.tensor([192, 319]),
     r"weight_shape in .* says \[192, 319\], but config\.json says \[192, 320\]", (load,)),
])  # fmt: skip
def test_broken_int4_weights_are_named(part, values, named, readers, int4, tmp_path) -> None:
    (tmp_path / "config.json").write_text((int4 / "published" / "config.json").read_text())
    stored, name = (
        load_file(int4 / "published" / "model.safetensors"),
        "model.layers.1.mlp.experts.3.up_proj.weight",
    )
    del stored[f"{name}_{part}"]
    save_file(stored | ({} if values is None else {f"{name}_{part}": values}), tmp_path / "model.safetensors")
    for read in readers:
        with pytest.raises(ConfigError, match=named):
            read(tmp_path)


def test_mxfp4_weights_of_another_shape_or_without_scales_are_named(mxfp4, tmp_path) -> None:
    published, name = mxfp4 / "published", "model.layers.0.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    tensors = load_file(published / "model.safetensors")
    cut = tensors[f"{name}_scales"][:, :, :1].contiguous()
    save_file(tensors | {f"{name}_scales": cut}, tmp_path / "model.safetensors")
    for read in BOTH:
        with pytest.raises(
            ConfigError, match=r"gate_up_proj_scales .* is \[8, 192, 1\], .* says \[8, 192, 2\]"
        ):
            read(tmp_path)
    del tensors[f"{name}_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of .*layers\.0\.mlp\.experts\.gate_up_proj_scales"):
        check(tmp_path)


def test_missing_scales_are_named(tmp_path: Path) -> None:
    publish(write_model(tmp_path / "source"), tmp_path / "published", tmp_path / "wide")
    index = tmp_path / "published" / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    del files["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConfigError, match=r"folder lacks .*layers\.1\.self_attn\.o_proj\.weight_scale_inv"):
        check(tmp_path / "published")


def test_an_export_of_published_float8_weights_says_that_it_is_wide(tmp_path: Path) -> None:
    publish(write_model(tmp_path / "source"), tmp_path / "published", tmp_path / "wide")
    (tmp_path / "out").mkdir()
    export_folder.copy_side_files(tmp_path / "published", tmp_path / "out", dtype="bfloat16", changes={})
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_folder_without_weights_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        hf_folder.read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        hf_folder.tensor_files(tmp_path)


def test_export_never_overwrites(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists"):
        export_folder.require_new(tmp_path)


BELONGS = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "merges.txt", "vocab.json", "tiktoken.model",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja",
    "generation_config.json", "preprocessor_config.json", "tokenization_kimi.py", "README.md", "LICENSE",
    "LICENSE.txt", "NOTICE",
)  # fmt: skip
OF_OTHER_WEIGHTS = (
    "tf_model.h5", "model.gguf", "model-Q4_K_M.gguf", "flax_model.msgpack", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "consolidated.00.pth", "model.onnx", "openvino_model.xml", "weights.npz",
    "model.ckpt", "model.tflite", "adapter_model.safetensors", "adapter_config.json", "hf_quant_config.json",
    "quantize_config.json", "training_args.bin", "optimizer.pt", "trainer_state.json", "onnx/model.onnx",
    "original/params.json", "model.safetensors.index.json", "1_Pooling/config.json", ".gitattributes",
    ".cache/x.json", "additional_chat_templates/old.bin",
)  # fmt: skip


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_an_export_has_what_belongs_to_the_folder_and_nothing_of_other_weights(
    umask: int, folder: Path, tmp_path: Path
) -> None:
    """Copies get the permissions of umask, whatever the source's are."""
    source, out = tmp_path / "source", tmp_path / "out"
    for name in ("config.json", *BELONGS, *OF_OTHER_WEIGHTS):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text((folder / "config.json").read_text() if name == "config.json" else name)
        (source / name).chmod(0o400)
    before = os.umask(umask)
    try:
        out.mkdir()
        export_folder.copy_side_files(source, out, dtype="float32", changes={})
    finally:
        os.umask(before)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(out)) for path in files) == sorted(("config.json", *BELONGS))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


def test_side_files_are_copied_and_the_type_is_set(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "generation_config.json"):
        (source / name).write_text((folder / name).read_text())
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"")
    for dtype in ("bfloat16", "float32"):
        out = tmp_path / dtype
        out.mkdir()
        export_folder.copy_side_files(source, out, dtype=dtype, changes={"absent": 1})
        assert sorted(p.name for p in out.iterdir()) == [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
        ]
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert (tmp_path / "bfloat16" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
