"""Folders in and out without an engine: every layout's ranks load their pieces, and the pieces make the folder again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.errors import CheckpointError, ConfigError
from mrl.models.families import family_of, require_trainable
from mrl.models.hf_config import stored_block
from mrl.models.layout import Layout
from mrl.training.hf import export
from mrl.training.hf import folder as hf_folder
from tests.published import publish, publish_mxfp4
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
    """(rank, chunk, parameter) -> what that rank would load."""
    config = hf_folder.read_config(folder)
    family = family_of(config)
    files = hf_folder.tensor_files(folder)
    expected = family.checkpoint_tensors(config)
    loaded = {}
    for place in layout.places():
        targets = [
            (local, torch.full(local.shape, 7.0, dtype=torch.bfloat16))
            for local in family.local_tensors(config, layout, place)
        ]
        hf_folder.load_pieces(targets, files, expected, block=stored_block(config))
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
    for place in layout.places():
        for local in family.local_tensors(config, layout, place):
            for piece in local.pieces:
                value = hf_folder.box(
                    loaded[place.rank, local.chunk, local.name], piece.local_start, piece.shape
                )
                target = hf_folder.box(again[piece.tensor], piece.start, piece.shape)
                assert target.isnan().all() or torch.equal(target, value), f"{piece} of {place} differs"
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


def test_padding_of_the_vocabulary_is_zero(folder: Path) -> None:
    loaded = load_all(folder, Layout(tp=4))
    last = loaded[3, 0, "embedding.word_embeddings.weight"]
    assert last.shape[0] * 4 == 132
    assert (last[-1] == 0).all() and (last[-2] != 0).any()


@pytest.fixture
def spoiled(folder: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder to be written again with other tensors."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path, load_file(folder / "model.safetensors")


def check(folder: Path) -> None:
    config = hf_folder.read_config(folder)
    expected = family_of(config).checkpoint_tensors(config)
    block = stored_block(config)
    hf_folder.check_names(hf_folder.tensor_files(folder), expected, folder=folder, tied=False, block=block)
    load_all(folder, Layout())


def test_a_missing_tensor_is_named(spoiled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = spoiled
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of .*experts\.5\.up_proj"):
        check(path)


def test_an_unknown_tensor_is_named(spoiled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = spoiled
    save_file(tensors | {"model.surprise": torch.zeros(1)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not know, first \['model\.surprise'\]"):
        check(path)


def test_a_tensor_of_another_shape_is_named(spoiled: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = spoiled
    tensors["model.norm.weight"] = torch.zeros(47)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight .* is \[47\], config\.json says \[48\]"):
        check(path)


WIDTHS = {"hidden_size": 320, "moe_intermediate_size": 192, "intermediate_size": 192, "head_dim": 48}
"""Tensors of one, two and three blocks, whole and not; tensor parallelism cuts inside them."""


@pytest.mark.parametrize(("family", "layout", "powers_of_two"), [
    ("qwen3_moe", Layout(), False),
    ("qwen3_moe", Layout(tp=4, etp=2, ep=2, pp=2), False),
    ("deepseek_v3", Layout(tp=2, ep=2), False),
    ("deepseek_v3", Layout(tp=2, ep=2), True),
    ("kimi_k2", Layout(pp=2, ep=2, dp=2), False),
], ids=str)  # fmt: skip
def test_published_float8_weights_load_as_what_they_mean(
    family: str, layout: Layout, powers_of_two: bool, tmp_path: Path
) -> None:
    widths = WIDTHS if family == "qwen3_moe" else {"hidden_size": 320, "moe_intermediate_size": 192}
    source = write_model(tmp_path / "source", family, dtype=torch.bfloat16, **widths)
    publish(source, tmp_path / "published", tmp_path / "wide", powers_of_two=powers_of_two)
    require_trainable(hf_folder.read_config(tmp_path / "published"))
    check(tmp_path / "published")
    published, wide = load_all(tmp_path / "published", layout), load_all(tmp_path / "wide", layout)
    assert all(torch.equal(published[key], wide[key]) for key in wide)
    coarse = load_all(source, layout)
    assert sum(not torch.equal(coarse[key], wide[key]) for key in wide) > len(wide) / 3


@pytest.fixture(scope="module")
def microscaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `published` and `wide`."""
    folder = tmp_path_factory.mktemp("mxfp4")
    source = write_model(folder / "source", "gpt_oss", hidden_size=64, intermediate_size=96)
    publish_mxfp4(source, folder / "published", folder / "wide")
    return folder


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, ep=4, dp=2)], ids=str)
def test_published_mxfp4_weights_load_as_transformers_reads_them(layout: Layout, microscaled: Path) -> None:
    require_trainable(hf_folder.read_config(microscaled / "published"))
    check(microscaled / "published")
    published, wide = load_all(microscaled / "published", layout), load_all(microscaled / "wide", layout)
    assert published.keys() == wide.keys()
    assert all(torch.equal(published[key], wide[key]) for key in wide)
    assert any(name.endswith("experts.weight1") and tensor.std() > 0 for (*_, name), tensor in wide.items())


def test_any_box_of_mxfp4_weights_is_read(microscaled: Path) -> None:
    """Rows of several experts, and columns that begin and end inside a block."""
    config = hf_folder.read_config(microscaled / "published")
    family, name = family_of(config), "model.layers.1.mlp.experts.down_proj"
    boxes = [(name, ((70, 5), (150, 40))), (name, ((3, 64), (1, 32))), (name, ((0, 0), (8 * 64, 96)))]
    read = [
        dict(hf_folder.read_boxes(microscaled / folder, family, config, torch.bfloat16, boxes))
        for folder in ("published", "wide")
    ]
    assert [read[0][n].shape for n in range(3)] == [(150, 40), (1, 32), (512, 96)]
    assert all(torch.equal(read[0][n], read[1][n]) for n in range(3))


def test_mxfp4_weights_of_another_shape_or_without_scales_are_named(
    microscaled: Path, tmp_path: Path
) -> None:
    published, name = microscaled / "published", "model.layers.0.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    tensors = load_file(published / "model.safetensors")
    cut = tensors[f"{name}_scales"][:, :, :1].contiguous()
    save_file(tensors | {f"{name}_scales": cut}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gate_up_proj_scales .* is \[8, 192, 1\], .* says \[8, 192, 2\]"):
        check(tmp_path)
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
    with pytest.raises(ConfigError, match=r"lacks 1 of .*layers\.1\.self_attn\.o_proj\.weight_scale_inv"):
        check(tmp_path / "published")


def test_an_export_of_published_float8_weights_says_that_it_is_wide(tmp_path: Path) -> None:
    publish(write_model(tmp_path / "source"), tmp_path / "published", tmp_path / "wide")
    (tmp_path / "out").mkdir()
    export.copy_side_files(tmp_path / "published", tmp_path / "out", dtype="bfloat16", changes={})
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_folder_without_weights_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        hf_folder.read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        hf_folder.tensor_files(tmp_path)


def test_export_never_overwrites(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        export.require_new(tmp_path)


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
        export.copy_side_files(source, out, dtype=dtype, changes={"absent": 1})
        assert sorted(p.name for p in out.iterdir()) == [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
        ]
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert (tmp_path / "bfloat16" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
