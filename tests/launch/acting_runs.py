"""Arguments of a small real run of episodes: one slot, a random tiny model with a chat template."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
_FILE = Path(__file__).parent / "programs.py"
PROGRAM = f"agent={{environment: '{_FILE}:Chatting', max_turn_tokens: 24, max_turns: 6}}"
"""A program that calls the policy by itself."""


def words(acting: Path, folder: Path, name: str, *extra: str) -> list[str]:
    """Return arguments; a third of the random model's tokens end a turn (generation_config.json)."""
    return [
        str(ROOT / "configs/quickstart.yaml"),
        f"run={{name: {name}, folder: {folder}}}",
        f"model={{path: {acting}/model, max_length: 256}}",
        f"data={{train: {acting}/train.jsonl, validation: {acting}/validation.jsonl, max_prompt_tokens: 64}}",
        f"agent={{environment: '{Path(__file__).parent}/environments.py:Counting', max_turn_tokens: 24}}",
        "reward={kind: environment}",
        "rollout={max_response_tokens: 180}",
        "training={layout: {ep: 1, dp: 1}, optimizer: {lr: 1e-3}}",
        "loop.prompts_per_step=4",
        "loop.samples_per_prompt=4",
        "loop.validation={every_steps: 2, num_prompts: 8}",
        "loop.max_rollout_mismatch=1e-4",
        *extra,
    ]
