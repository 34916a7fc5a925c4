"""`mrl eval`: measure greedy reward, avg@k, pass@k and solve rates of a model folder; no trainer, no Ray."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.data.difficulty import rate_line
from mrl.data.identity import prompt_id
from mrl.data.load_rows import load_validation
from mrl.data.tokenise import load_tokenizer_for
from mrl.errors import ConfigError, DataError
from mrl.files import output_lock, replace_durably
from mrl.launch.commands import earlier_start
from mrl.launch.commands.digests import model_digest
from mrl.launch.commands.one_engine import one_engine
from mrl.launch.commands.this_machine import with_local_models, with_values
from mrl.launch.workers.environments import check_environments
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.validate import Scores, greedy_sampling, validation_metrics, validation_sampling_of
from mrl.observe.samples_log import row_of
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt

SAMPLES, RATES, SUMMARY = "samples.jsonl", "rates.jsonl", "summary.json"
SECONDS_BETWEEN = 10.0
"""Between two progress lines."""


def evaluate(config: Config, *, out: str | None = None, train: bool = False) -> dict[str, float]:
    """Return `val/reward` (and `val/accuracy`, if it is one), `val/avg@k` and `val/pass@k` over
    data.validation, or with `train` over data.train.

    k is loop.validation.num_samples. The new folder `out` gets a summary (model, settings, finally metrics),
    every sample once it is judged: kind "validation" if greedy, else "sampled"; metrics are means of `score`;
    and each prompt's solve rate over the last kind. Raises ConfigError if `out` is not empty or in use, or
    for solve rates of no sampled responses.
    """
    if train:
        if not config.loop.validation.num_samples:
            raise ConfigError(
                "loop.validation.num_samples is 0: greedy responses give no solve rate; set it, e.g. to 16"
            )
        data = config.data.model_copy(update={"validation": config.data.train, "difficulty": None})
        config = config.model_copy(update={"data": data})
    with output_lock(Path(out), "--out") if out else contextlib.nullcontext():
        return _evaluate(config, Path(out) if out else None, train=train)


def _evaluate(config: Config, out: Path | None, *, train: bool) -> dict[str, float]:
    start = time.monotonic()
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not empty; choose a new folder")
    config, chosen = with_values(with_local_models(earlier_start.dated(config)), sections=["rollout"])
    tokenizer = load_tokenizer_for(config.model)
    acting = check_environments(config, tokenizer)
    dataset = load_validation(
        config.data, config.reward, tokenizer, tools=acting.tools_of if acting else None
    )
    print(dataset.report.text(), *(f"eval: {line}" for line in chosen), sep="\n", file=sys.stderr, flush=True)
    prompts = dataset.validation_prompts(sys.maxsize if train else config.loop.validation.num_prompts)
    if not prompts:
        raise DataError("data.validation is not set or has no rows left; mrl eval measures it")
    results = Results(out, config, prompts) if out else None
    sampling = validation_sampling_of(config)
    _say(f"starting the engine, for {len(prompts)} prompts")
    with one_engine(config, tokenizer, acting, group_size=max(1, sampling.num_samples)) as rollouts:
        _say(f"the engine is up after {time.monotonic() - start:.0f} s")
        judged = partial(_measured, rollouts, prompts, results=results, reward=config.reward)
        responses, sampled = judged(greedy_sampling(sampling), "validation"), judged(sampling, "sampled")
    metrics = validation_metrics(responses, sampled, reward=config.reward)
    if results:
        results.end(metrics, seconds=time.monotonic() - start)
    return metrics


def _measured(
    rollouts: RolloutThread,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    kind: str,
    *,
    results: Results | None,
    reward: RewardSection,
) -> list[Scores]:
    """Return the scores of each prompt."""
    if not sampling.num_samples:
        return []
    scores: list[Scores] = []
    start = last_line = time.monotonic()
    for group in rollouts.generate_in_order(prompts, sampling):
        scores.append(Scores.of(group, reward))
        if results:
            results.add(kind, group, scores[-1])
        if time.monotonic() > last_line + SECONDS_BETWEEN:
            last_line = time.monotonic()
            _say(f"{len(scores)} of {len(prompts)} prompts ({kind})")
    _say(f"all {len(prompts)} prompts ({kind}) in {time.monotonic() - start:.0f} s")
    return scores


def _say(text: str) -> None:
    print(f"eval: {text}", file=sys.stderr, flush=True)


class Results:
    """Output folder of a measurement."""

    def __init__(self, folder: Path, config: Config, prompts: Sequence[Prompt]) -> None:
        self._folder = folder
        self._rated = "sampled" if config.loop.validation.num_samples else "validation"
        self._about: dict[str, Any] = {
            "model": {"path": config.model.path, "sha256": model_digest(config.model.path)},
            "prompts": len(prompts),
            "rows": hashlib.sha256(" ".join(map(prompt_id, prompts)).encode()).hexdigest()[:16],
            "settings": config.model_dump(mode="json"),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._write(self._about)

    def add(self, kind: str, group: Group, scores: Scores) -> None:
        """Write the samples of the next prompt; the caller handles OSError."""
        rows = [
            row_of(0, kind, group, sample) | {"score": score}
            for sample, score in zip(group.samples, scores.of_samples, strict=True)
        ]
        with (self._folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        if kind == self._rated:
            with (self._folder / RATES).open("a", encoding="utf-8") as file:
                file.write(rate_line(group.prompt, scores.known))

    def end(self, metrics: dict[str, float], *, seconds: float) -> None:
        """Write the final metrics; `seconds`: duration of the call."""
        self._write({"metrics": metrics, "seconds": seconds} | self._about)

    def _write(self, summary: dict[str, Any]) -> None:
        replace_durably(self._folder / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())
