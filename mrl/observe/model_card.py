"""Write the README.md of an exported folder, in the form that model hubs read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mrl.config.root import Config

CACHED = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")
"""Model folder in the Hugging Face cache."""
HUB_ROWS = re.compile(r"hf://(?P<name>[^:@]+)")
LICENSE_KEYS = ("license", "license_name", "license_link", "language")
"""Keys that a derived model keeps of its base's front matter."""
FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
NO_FIGURES = ("val/prompts", "val/no_reward")


def model_card(
    config: Config, *, step: int, dtype: str, versions: Mapping[str, str], row: Mapping[str, Any] | None
) -> str:
    """Return the model card of the policy after `step` steps.

    Args:
        row: Last metrics with a validation, or None.
    """
    base, matter = base_model(config.model.path), front_matter(Path(config.model.path) / "README.md")
    algorithm, loop = config.algorithm, config.loop
    files = [path for entry in config.data.train_entries() for path in entry.paths]
    datasets = list(dict.fromkeys(match["name"] for path in files if (match := HUB_ROWS.match(path))))
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "mrl", algorithm.estimator.name],
        **({"base_model": base} if base else {}),
        **({"datasets": datasets} if datasets else {}),
        **{key: matter[key] for key in LICENSE_KEYS if key in matter},
    }
    facts = {
        "started from": base or f"`{Path(config.model.path).name}`",
        "algorithm": f"estimator `{algorithm.estimator.name}`, loss `{algorithm.loss.name}`",
        "rewards": ", ".join(dict.fromkeys(f"`{part.kind}`" for part in config.reward.all_verifiers())),
        "training data": ", ".join(map(_shown, files)),
        "steps": f"{step} of {loop.steps}, each {loop.prompts_per_step} x {loop.samples_per_prompt} samples",
        "learning rate": f"{config.training.optimizer.lr:g}",
        "seed": str(config.run.seed),
        "weights": dtype,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or "not recorded",
    }
    lines = [
        f"# {config.run.name}, step {step}",
        "",
        "A policy trained by reinforcement learning with mrl (Megatron-core trains, vLLM generates). This "
        "card was written by the export; nobody has reviewed the model.",
        "",
        *_table("", "", facts),
        "",
        *_validation(config, row),
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{'\n'.join(lines)}\n"


def base_model(path: str) -> str | None:
    """Return the Hub name of a model folder in the Hugging Face cache; None for other folders."""
    match = CACHED.search(str(Path(path).resolve()))
    return f"{match['owner']}/{match['name']}" if match else None


def front_matter(readme: Path) -> dict[str, Any]:
    """Return a README's YAML front matter; empty if there is none that can be read."""
    try:
        block = FRONT_MATTER.match(readme.read_text(encoding="utf-8-sig"))
        matter = yaml.safe_load(block[1]) if block else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return matter if isinstance(matter, dict) else {}


def _shown(path: str) -> str:
    """Return a Hub name as it is, or a file's name without its folder on the training machine."""
    return f"`{path if path.startswith('hf://') else Path(path).name}`"


def _validation(config: Config, row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["This run had no validation before these weights were written."]
    files = ", ".join(_shown(path) for entry in config.data.validation_entries() for path in entry.paths)
    figures = {k: f"{v:.4f}" for k, v in row.items() if k.startswith("val/") and k not in NO_FIGURES}
    prompts = f"{int(row['val/prompts'])} prompts of {files}" if "val/prompts" in row else files
    head = f"Validation at step {int(row['step'])}, on {prompts}, scored by the rewards of the training run:"
    return [head, "", *_table("metric", "value", figures)]


def _table(name: str, value: str, rows: Mapping[str, str]) -> list[str]:
    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    return [f"| {name} | {value} |", "|---|---|", *(f"| {cell(k)} | {cell(v)} |" for k, v in rows.items())]
