"""`mrl eval`: greedy accuracy, avg@k and pass@k of a model folder on any data file, with the run's verifier. One engine, no trainer, no Ray."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from mrl.config.root import Config
from mrl.data.load import load_validation
from mrl.errors import ConfigError, DataError
from mrl.launch.commands.acting import look_at
from mrl.launch.commands.one_engine import collecting
from mrl.loops.validate import validate
from mrl.observe.samples_log import write_all
from mrl.samples import Group
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.checkpoint.folder import digest

SAMPLES, SUMMARY = "samples.jsonl", "summary.json"


def evaluate(config: Config, *, out: str | None = None) -> dict[str, float]:
    """`val/accuracy`, and `val/avg@k` and `val/pass@k` for k = loop.validation.num_samples, over data.validation.

    No training row is read. The new folder `out` then has every sample (kind "validation" where greedy, else "sampled") and a
    summary: the metrics, the settings and what they were measured on. ConfigError where it exists and is not empty.
    """
    folder, start, sampled = _new_folder(out) if out else None, time.monotonic(), list[Group]()
    metrics, greedy = _measure(config, sampled)
    if folder:
        write_all(folder / SAMPLES, 0, greedy, kind="validation")
        write_all(folder / SAMPLES, 0, sampled, kind="sampled")
        summary = {
            "metrics": metrics,
            "model": {"path": config.model.path, "sha256": model_digest(config.model.path)},
            "seconds": time.monotonic() - start,
            "settings": config.model_dump(mode="json"),
        }
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return metrics


def model_digest(path: str) -> str:
    """SHA-256, in hex, over names, sizes and SHA-256 of the files of a model folder: what was measured, wherever it lies."""
    folder = Path(path)
    files = {
        file.name: [file.stat().st_size, digest(file, version=1)]
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _new_folder(path: str) -> Path:
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {path} exists and is not empty; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _measure(config: Config, sampled: list[Group]) -> tuple[dict[str, float], list[Group]]:
    """The metrics and the greedy groups; the groups of k samples are put into `sampled`."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    acting = look_at(config, tokenizer)
    tools = acting.tools_of if acting else None
    dataset = load_validation(config.data, config.reward, tokenizer, tools=tools)
    print(dataset.report.text(), file=sys.stderr, flush=True)
    prompts = dataset.validation_prompts(config.loop.validation.num_prompts)
    if not prompts:
        raise DataError("mrl eval measures data.validation, which is not given or has no rows left")
    group_size = max(1, config.loop.validation.num_samples)
    with collecting(config, tokenizer, acting, group_size=group_size) as collector:
        return validate(collector, prompts, config, on_sampled=sampled.extend)
