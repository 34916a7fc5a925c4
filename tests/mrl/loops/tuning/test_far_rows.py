"""Heads on a backbone that was trained before disagree more on responses unlike the pairs' than on held-out ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import load
from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.data.conversation import Encoder
from mrl.data.style_probes import style_probes
from mrl.data.tokenise import load_tokenizer
from mrl.data.tune_rows import load_training, load_validation, scored
from mrl.launch.commands.tune import worker_changes
from mrl.loops.tuning.tuner import Tuner
from mrl.prepare import arithmetic, new_model
from mrl.training.hf.export import export_checkpoint
from mrl.training.hf.reward_model import RewardFolder, config_of
from mrl.training.worker import MegatronWorker
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[4]
HEADS = "{name: reward_model, heads: 5, center: {kind: batch_mean, weight: 1.0e-2}}"


def words(model: Path, task: Path, objective: str, files: tuple[str, str], epochs: int) -> list[str]:
    train, validation = (task / name for name in files)
    tune = (
        f"tune={{objective: {objective}, output: out, epochs: {epochs}, batch_rows: 64, optimizer: {{lr: 1e-3}}, "
        f"data: {{train: {train}, validation: {validation}}}}}"
    )
    return [f"model={{path: {model}, max_length: 16}}", "training.layout={ep: 1, dp: 1}", tune]


def tuned(rank: int, world: int, port: int, settings: list[str], folder: str, out: str) -> dict[str, Any]:
    """Tunes, writes the folder `out`, and returns the report of a reward model."""
    config = load([ROOT / "configs/quickstart.yaml"], settings)
    section = config.tune
    assert section is not None
    worker = MegatronWorker(
        **{"model": config.model} | worker_changes(config, section),
        training=config.training.model_copy(update={"optimizer": section.optimizer}),
        rank=rank,
        world_size=world,
        master_address="127.0.0.1",
        master_port=port,
    )
    tokenizer, is_scored = load_tokenizer(config.model.path), section.objective.is_reward_model
    encoder = Encoder(tokenizer, ends=[tokenizer.eos_token_id])
    rows = [part(section, encoder, max_length=16) for part in (load_training, load_validation)]
    rows = [scored(part) for part in rows] if is_scored else rows
    probes = style_probes(rows[1].rows, tokenizer, max_length=16, seed=1) if is_scored else ()
    tuner = Tuner(config, section, worker, *rows, folder=Path(folder), tell=lambda line: None, probes=probes)
    tuner.run(lambda: False)
    shards = Path(folder) / "shards"
    tuner.save_weights(shards)
    about = RewardFolder(config_of(config.model.path, tokenizer, heads=5), {}) if is_scored else None
    source = Path(config.model.path)
    export_checkpoint(shards, Path(out), source=source, dtype="float32", reward_model=about)
    return tuner.score_report()


@pytest.mark.integration
@pytest.mark.slow
def test_heads_disagree_more_far_from_their_pairs(tmp_path: Path) -> None:
    """The chance that a probe's response is disagreed on more than a held-out one, after the backbone learnt to write sums a little:
    0.5 where disagreement knows nothing of the distance, 0.40 of gibberish with a backbone of random weights. A response that is cut
    off is a number with fewer digits, which the pairs have too, and is not asked for."""
    task = arithmetic.write(tmp_path / "task", num_pairs=4000)
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    model = ModelSection(path=str(task / "model"), new=new, max_length=16)
    new_model.ensure(model, [str(task / "pairs.jsonl")], seed=0)
    start = tmp_path / "start"
    written = words(task / "model", task, "{name: sft}", ("sft.jsonl", "sft.jsonl"), 4)
    run_ranks(tuned, 1, written, str(tmp_path / "sft"), str(start))
    pairs = words(start, task, HEADS, ("pairs.jsonl", "pairs_validation.jsonl"), 2)
    (report,) = run_ranks(tuned, 1, pairs, str(tmp_path / "run"), str(tmp_path / "scores"))
    above = {name: each["above_held_out"] for name, each in report["heads"]["probes"].items()}
    assert set(above) == {"repetition", "gibberish", "cut_off"}
    assert above["gibberish"] > 0.6 and above["repetition"] > 0.55, above
