"""An engine that reads an image model's folder itself serves its text model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.models.families import FAMILIES
from mrl.rollout.request import Completion
from mrl.training.hf.hf_folder import tensor_files
from tests.engines import host_of
from tests.mrl.rollout import driving
from tests.published import publish
from tests.support.image_folders import IMAGE_MODELS, unpack_experts
from tests.tiny_models import BESIDE_IMAGES, write_model

pytestmark = pytest.mark.integration
ASKED = driving.requests(12, seed=3, ignore_stop=True)


def served(folder: Path, **settings: object) -> list[Completion]:
    """Return responses of an engine that read the folder, which also has unused tensors."""
    assert any(name.startswith(IMAGE_MODELS) for name in tensor_files(folder))
    with contextlib.closing(host_of(folder, engine={"real_weights": True}, **settings)) as host:
        return host.call(driving.generate, ASKED)


def test_all_families_that_carry_tensors_are_here() -> None:
    carrying = {family.model_type for family in FAMILIES.values() if family.copied_prefixes}
    assert carrying == set(BESIDE_IMAGES)


@pytest.mark.parametrize(
    ("family", "tp", "widths"),
    [
        ("qwen3_5", 1, {}),
        ("qwen3_5_moe", 2, {"moe_intermediate_size": 64}),
        # not square: transformers turns its experts by their shape
        pytest.param("qwen3_vl_moe", 2, {"moe_intermediate_size": 192}, marks=pytest.mark.slow),
        pytest.param("mistral3", 1, {}, marks=pytest.mark.slow),
        pytest.param("kimi_k25", 1, {}, marks=pytest.mark.slow),
    ],
)
def test_the_text_beside_images_is_read(family: str, tp: int, widths: dict[str, Any], tmp_path: Path) -> None:
    """Also with workers in separate processes and packed experts."""
    folder = write_model(tmp_path / family, family, served=True, **widths)
    answers = served(folder, dtype="float32", tp=tp)
    # transformers' own float32 is 1e-4 off float64 with delta nets of these widths
    assert driving.worst_gap(folder, ASKED, answers) < 5e-5


def test_float8_text_beside_images_is_read(tmp_path: Path) -> None:
    """Qwen3.5's FP8 form, experts unpacked: results match the float8 values, not the original ones.

    The middle response counts, because near-ties of a router move single ones far."""
    widths = dict.fromkeys(
        ("head_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "linear_key_head_dim"), 128
    )
    source = write_model(
        tmp_path / "source", "qwen3_5_moe",
        dtype=torch.bfloat16, hidden_size=256, linear_value_head_dim=128, **widths,
    )  # fmt: skip
    unpack_experts(source)
    publish(source, tmp_path / "published", tmp_path / "wide")
    answers = served(tmp_path / "published", dtype="bfloat16")
    near, far = (driving.middle_gap(tmp_path / reference, ASKED, answers) for reference in ("wide", "source"))
    assert near < 0.5 < far, (near, far)
