"""Arguments of a small real run: two slots, a random tiny model, a few prompts per step."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def words(task: Path, folder: Path, name: str, *extra: str) -> list[str]:
    """Return arguments of run `name` in `folder` over the `task` fixture's rows and model."""
    return [
        str(ROOT / "configs/quickstart.yaml"),
        f"run={{name: {name}, folder: {folder}}}",
        f"model={{path: {task}/model, max_length: 16}}",
        f"data.train={task}/train.jsonl",
        f"data.validation={task}/validation.jsonl",
        f"reward={{kind: plugin, style: verl, path: {Path(__file__).parent}/rewards.py:even_digits}}",
        "training.optimizer={lr: 1e-3}",
        "loop.prompts_per_step=4",
        "loop.samples_per_prompt=4",
        "loop.validation={every_steps: 2, num_prompts: 8}",
        "loop.max_rollout_mismatch=1e-4",
        *extra,
    ]
