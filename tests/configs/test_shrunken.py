"""Each recipe trains one real step on CPU, with the same parallelism at tiny sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.files import CONFIGS
from mrl.observe import metrics_log
from mrl.prepare import arithmetic_rows, tokenizer
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration
ROOT = CONFIGS.parent
PLUGIN = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Half of a random model's answers: their first letter decides, so that groups have a spread."""
    return float(ord(solution_str[:1] or "0") % 2)
'''
RECIPES = {
    "qwen3_next_80b_a3b": ("qwen3_next", {
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64,
    }),
    "kimi_k2": ("deepseek_v3", {"qk_nope_head_dim": 32, "v_head_dim": 32}),
    "glm_4_5_air": ("glm4_moe", {}),
    "qwen3_235b_a22b": ("qwen3_moe", {}),
}  # fmt: skip
"""Recipe -> its family and widths that two engine ranks can split; test_recipes.py plans the others."""
LAYOUT = {"tp": 2, "pp": 2, "ep": 2, "dp": 1, "cp": 1}
"""Every axis above one is two; dp is what two cores can run."""


def shrunken(recipe: str, folder: Path) -> list[str]:
    """Return the recipe at tiny sizes, off-loaded and with wide engines; the algorithm stays the recipe's."""
    arithmetic_rows.write_arithmetic(folder / "data", largest=9, num_validation=8, num_sft=8)
    (folder / "verifier.py").write_text(PLUGIN)
    family, widths = RECIPES[recipe]
    size = tokenizer.write_characters([folder / "data" / "train.jsonl"], folder / "model")
    widths = widths | {"moe_intermediate_size": 64, "vocab_size": -(-size // 16) * 16}
    write_model(folder / "model", family, served=True, **widths)
    overlay = folder / "small.yaml"
    overlay.write_text(
        f"""
run: {{name: small, folder: {folder}/runs}}
model: {{path: {folder}/model, max_length: 32}}
data:
  train: {folder}/data/train.jsonl
  validation: null
  format: auto
  max_prompt_tokens: 16
reward: {{kind: plugin, path: "{folder}/verifier.py:compute_score", style: verl, workers: 1}}
algorithm:
  minibatches: 1
  shaping:
    overlong: {{max_tokens: 8, buffer_tokens: 4}}
training:
  dtype: float32
  microbatch_tokens: 256
  offload: always
  optimizer: {{moments_dtype: float32}}
rollout:
  dp: 1
  tp: 2
  expert_parallel: false
  quantization: none
  dtype: float32
  max_response_tokens: 8
  max_num_seqs: 16
  kv_cache_bytes: 33554432
  enforce_eager: true
sync: {{bucket_bytes: 1048576}}
loop:
  steps: 1
  prompts_per_step: 2
  samples_per_prompt: 4
  max_rollout_mismatch: 1.0e-4
  validation: {{before_training: false, after_training: false, every_steps: 0}}
  checkpoint: {{every_steps: 0, at_end: false}}
"""
    )
    words = [f"training.layout.{axis}={size}" for axis, size in LAYOUT.items()]
    return [str(CONFIGS / f"{recipe}.yaml"), str(overlay), *words]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shrunken_recipe_trains_one_step(recipe: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mrl.cli", "train", *shrunken(recipe, tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    rows = [
        row for row in metrics_log.read(tmp_path / "runs" / "small" / "metrics.jsonl") if row["step"] == 1
    ]
    assert len(rows) == 1
    assert rows[0]["rollout/groups"] >= 1
    assert rows[0]["optim/grad_norm"] > 0, rows[0]
    assert rows[0]["sync/whole_bytes"] == 0
