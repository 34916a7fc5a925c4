"""Optimizer steps of real ranks against transformers in float64, torch's AdamW and a schedule by hand.

The oracle shares no code with the project: comparing layouts does not show a rule that all of them get wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sections.training import LayoutSection, OptimizerSection
from mrl.samples import TrainBatch
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import CORRECTION, name_of
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, write_model

pytestmark = pytest.mark.integration

CLIP = 0.05
"""Far below the gradients' norms, so that every step is clipped."""
EPS = 1e-5
"""So large that the sign of a gradient of nearly 0 decides nothing."""
SAVED = OptimizerSection(
    lr=2e-3, min_lr=2e-4, warmup_steps=2, schedule="cosine", decay_steps=8, weight_decay=0.1,
    eps=EPS, clip_grad=CLIP,
)  # fmt: skip
RESUMED = SAVED.model_copy(
    update={"lr": 1e-3, "min_lr": 4e-4, "weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9}
)
RATES = [2e-3 * 0.5, 2e-3] + [4e-4 + 6e-4 * 0.5 * (1 + np.cos(np.pi * k / 6)) for k in range(3)]
"""Two steps of linear warm-up to 2e-3, then three of the six from 1e-3 to 4e-4 along a cosine."""
STEPS_SAVED = 2
BOUND = 5e-5
"""Error of a tensor's whole change, relative to the change; float32 near 1 (norms) leaves 2e-5."""


def save_after_steps(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], path: str
) -> list[dict[str, float]]:
    at = scenarios.worker(rank, world, port, folder, layout, optimizer=SAVED)
    metrics = scenarios.train(at, STEPS_SAVED)
    at.save_checkpoint(path, {})
    return metrics


def resume_and_export(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], path: str, out: str
) -> list[dict[str, float]]:
    """Run the remaining steps from the checkpoint under other settings."""
    at = scenarios.worker(rank, world, port, folder, layout, optimizer=RESUMED)
    at.load_checkpoint(path)
    metrics = scenarios.train(at, len(RATES) - STEPS_SAVED)
    scenarios.export(at, Path(out))
    return metrics


def oracle_loss(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return the cross entropy at the scenarios' temperature over the loss mask, one sample at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        tokens, mask = (
            torch.from_numpy(batch.tokens[start:end]).long(),
            torch.from_numpy(batch.loss_mask[start:end]),
        )
        log_p = (model(tokens[None]).logits[0, :-1].double() / scenarios.TEMPERATURE).log_softmax(-1)
        total = total - log_p.gather(1, tokens[1:, None])[mask[1:]].sum()
    return total / int(batch.loss_mask.sum())


def oracle_steps(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return checkpoint tensors after all steps, and gradient norms before clipping."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if "norm" not in name]
    norms = [p for name, p in named.items() if "norm" in name]
    adam = torch.optim.AdamW([{"params": decayed}, {"params": norms}], eps=EPS)
    batch, totals = random_batch(10, seed=1), []
    for step, rate in enumerate(RATES):
        decay, betas = (0.1, (0.9, 0.95)) if step < STEPS_SAVED else (0.5, (0.8, 0.9))
        for group, group_decay in zip(adam.param_groups, (decay, 0.0), strict=True):
            group.update(lr=float(rate), weight_decay=group_decay, betas=betas)
        adam.zero_grad()
        oracle_loss(model, batch).backward()
        gradients = [p.grad for p in named.values() if p.grad is not None]
        total = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        for gradient in gradients:
            gradient.mul_(CLIP / (total + 1e-6))
        adam.step()
        totals.append(total)
    out = folder.with_name("oracle")
    model.save_pretrained(out)  # under the checkpoint's names: transformers fuses experts
    return load_file(out / "model.safetensors"), totals


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [("qwen3_moe", {"ep": 2, "dp": 2}, {}), ("deepseek_v3", {}, {"tp": 2, "ep": 2})],
    ids=lambda value: name_of(value) if isinstance(value, dict) else value,
)
def test_steps_before_and_after_a_resume_are_adamws_with_norms_left_undecayed(
    family: str, first: dict[str, int], second: dict[str, int], tmp_path: Path
) -> None:
    """Weight decay, clipping and schedule agree in two layouts, with settings that changed between them."""
    folder = write_model(tmp_path / "model", family)
    checkpoint, out = str(tmp_path / "step-2"), str(tmp_path / "out")
    worlds = [LayoutSection(**layout).world_size for layout in (first, second)]
    metrics = run_ranks(save_after_steps, worlds[0], str(folder), first, checkpoint)[0]
    metrics += run_ranks(resume_and_export, worlds[1], str(folder), second, checkpoint, out)[0]
    expected, totals = oracle_steps(folder)
    assert min(totals) > 4 * CLIP
    assert [m["grad_norm"] for m in metrics] == pytest.approx(totals, rel=1e-4)
    assert [m["lr"] for m in metrics] == pytest.approx(RATES)
    before, after = load_file(folder / "model.safetensors"), load_file(Path(out, "model.safetensors"))
    assert before.keys() == after.keys() == expected.keys()
    errors = {}
    for name, start in before.items():
        change, error = expected[name] - start.double(), after[name].double() - expected[name]
        errors[name] = (
            float(error.norm() / change.norm()) if not name.endswith(CORRECTION) else float(error.norm())
        )
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < BOUND, f"{worst}: {errors[worst]}"
