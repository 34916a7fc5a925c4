"""Teachers on the policy's ranks: an update's divergence and gradient match those of whole logits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.sections.distillation import DistillationSection
from mrl.config.sections.training import LayoutSection
from tests.mrl.training import distillations, scenarios
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_model, write_model

pytestmark = pytest.mark.integration


def oracle(folder: Path, teachers: list[Path], kind: str) -> tuple[float, float, float]:
    """Return (loss, mean divergence of taught tokens, gradient norm) by transformers on whole logits."""
    batch, policy = random_batch(10, seed=1), reference_model(folder, torch.float32)
    models = [reference_model(path, torch.float32) for path in teachers]
    total, taught = torch.zeros(()), 0
    policy.requires_grad_(True)
    for number, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        if (teacher := number % 3 - 1) < 0:
            continue
        ids, mask = (torch.from_numpy(batch.tokens[start:end]).long()[None], batch.loss_mask[start + 1 : end])
        log_p, log_q = (
            (model(ids).logits[0, :-1] / scenarios.TEMPERATURE).log_softmax(-1)
            for model in (policy, models[teacher])
        )
        log_q, log_m = log_q.detach(), torch.logaddexp(log_p, log_q.detach()) - np.log(2)
        divergences = {
            "reverse": (log_p.exp() * (log_p - log_q)).sum(-1),
            "forward": (log_q.exp() * (log_q - log_p)).sum(-1),
            "jsd": ((log_q.exp() * (log_q - log_m)) + (log_p.exp() * (log_p - log_m))).sum(-1) / 2,
        }[kind]
        total, taught = total + divergences[torch.from_numpy(mask)].sum(), taught + int(mask.sum())
    loss = total / int(batch.loss_mask.sum())
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None) ** 0.5
    return float(loss), float(total) / taught, norm


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({}, "jsd"),
        ({"tp": 2, "ep": 2}, "reverse"),
        pytest.param({"ep": 2, "dp": 2}, "forward", marks=pytest.mark.slow),
        pytest.param({"pp": 2}, "jsd", marks=pytest.mark.slow),
        pytest.param({"cp": 2}, "reverse", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_has_the_gradient_of_whole_logits(layout, kind, one_rank_of, tmp_path) -> None:
    folder, _ = one_rank_of.of("qwen3_moe")
    check(
        folder, [write_model(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in (7, 8)], layout, kind
    )


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({"ep": 2, "dp": 2}, "reverse"),
        pytest.param({}, "forward", marks=pytest.mark.slow),
        pytest.param({"tp": 2, "ep": 2}, "jsd", marks=pytest.mark.slow),
        pytest.param({"pp": 2, "vpp": 2}, "jsd", marks=pytest.mark.slow),
        pytest.param({"cp": 2}, "forward", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_teachers_of_other_families_and_widths(layout, kind, one_rank_of, tmp_path) -> None:
    """A dense teacher, and a mixture that is wider than the policy, next to one of its shapes."""
    folder, _ = one_rank_of.of("qwen3_moe")
    dense = write_model(tmp_path / "dense", "llama", seed=7, hidden_size=48)
    mixture = write_model(tmp_path / "mixture", "mixtral", seed=8)
    check(folder, [dense, mixture], layout, kind)


def test_the_start_under_adapters_is_a_teacher_as_its_copy_is(one_rank_of, tmp_path) -> None:
    folder, _ = one_rank_of.of("qwen3_moe")
    copy = shutil.copytree(folder, tmp_path / "copy")
    ((start, other),) = run_ranks(distillations.starts_as_teachers, 1, str(folder), str(copy))
    assert start["distillation/divergence"] > 1e-6
    for name in ("distillation/divergence", "distillation/loss"):
        assert start[name] == pytest.approx(other[name], rel=1e-6)


def check(folder: Path, teachers: list[Path], layout: dict[str, int], kind: str) -> None:
    section = DistillationSection(
        teachers={str(n): str(path) for n, path in enumerate(teachers)},
        divergence=kind,  # type: ignore
        teachers_only=True,
    )
    world = LayoutSection(**layout).world_size
    results = run_ranks(distillations.exact_step, world, str(folder), layout, section)
    loss, divergence, norm = oracle(folder, teachers, kind)
    for metrics in results:
        assert metrics["distillation/loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["distillation/divergence"] == pytest.approx(divergence, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["skipped"] == 0
