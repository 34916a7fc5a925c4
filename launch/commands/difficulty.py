"""`mrl difficulty`: measure how often a model folder solves each training prompt, with one engine, without
trainer or Ray. An interrupted measurement resumes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.data import DifficultySection
from mrl.data.difficulty import RateFile, SolveRate, prompt_id
from mrl.data.load_rows import load_data
from mrl.data.tokenise import load_tokenizer_for
from mrl.errors import ConfigError, RewardError
from mrl.files import output_lock, put_aside
from mrl.launch.commands import earlier_start
from mrl.launch.commands.digests import engine_contents, model_digest, part_contents
from mrl.launch.commands.one_engine import one_engine
from mrl.launch.workers.environments import check_environments
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.validate import Scores
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt

DATE, REWARD = "chat_template_date", "reward"
SCORES = frozenset({"kind", "path", "engine", "server", "style", "group", "min_reward", "weight", "gate"})
"""Settings of a verifier that determine its score, besides its kind's rules."""
PROMPTS_A_WRITE = 256
"""Prompts per write to the file."""


def measure_difficulty(config: Config) -> str:
    """Write `data.difficulty.file` and return a one-sentence summary.

    A sample solves its prompt if its reward, or the first named part of it, is at least 1, as in pass@k.
    Raises ConfigError for a file of another model or sampling, before the engine starts.
    """
    section = config.data.difficulty
    if section is None:
        raise ConfigError(
            "data.difficulty.file is not set; set the file to write, e.g. data.difficulty.file=rates.jsonl"
        )
    with output_lock(Path(section.file), "data.difficulty.file"):
        return _measure(config, section)


def _measure(config: Config, section: DifficultySection) -> str:
    damaged: list[bytes] = []
    existing = RateFile.read(section.file, damaged=damaged) if Path(section.file).exists() else None
    config = earlier_start.dated(config, existing and existing.about.get(DATE))
    tokenizer = load_tokenizer_for(config.model)
    acting = check_environments(config, tokenizer)
    unchosen = config.data.model_copy(update={"difficulty": None})
    dataset = load_data(unchosen, config.reward, tokenizer, tools=acting.tools_of if acting else None)
    print(dataset.report.text(), file=sys.stderr, flush=True)
    prompts = list({prompt_id(p): p for source in dataset.train for p in source.rows}.values())
    sampling = dataclasses.replace(Sampling.of(config), num_samples=section.samples)
    file = _resumed(section, existing, _about(config, sampling))
    if damaged:
        put_aside(Path(section.file), damaged)
    survey = Survey(prompts, file, section, sampling, config.reward)
    if survey.waiting():
        with one_engine(config, tokenizer, acting, group_size=section.samples) as rollouts:
            survey.run(rollouts)
    file.write(section.file, prompts, section)
    return summary([file.prompts[prompt_id(p)] for p in prompts], section)


class Survey:
    """Measures prompts in parts until each one's solve rate is known."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        file: RateFile,
        section: DifficultySection,
        sampling: Sampling,
        reward: RewardSection,
    ) -> None:
        self._prompts = [dataclasses.replace(prompt, index=place) for place, prompt in enumerate(prompts)]
        self._file, self._section, self._sampling, self._reward = file, section, sampling, reward

    def waiting(self) -> list[Prompt]:
        """Return the prompts without a rate, in order; interruptions do not change a prompt's seeds."""
        return [prompt for prompt in self._prompts if prompt_id(prompt) not in self._file.prompts]

    def run(self, rollouts: RolloutThread) -> None:
        """Measure all waiting prompts and append to the file as results arrive."""
        path, waiting = Path(self._section.file), self.waiting()
        known = [p for p in self._prompts if prompt_id(p) in self._file.prompts]
        self._file.write(path, known, self._section)  # removes an incomplete last line
        num_known = len(known)
        for groups in itertools.batched(rollouts.generate_in_order(waiting, self._sampling), PROMPTS_A_WRITE):
            self._take(groups)
            with path.open("a", encoding="utf-8") as stream:
                stream.writelines(self._file.line(group.prompt, self._section) for group in groups)
            num_known += len(groups)
            print(f"difficulty: {num_known} of {len(self._prompts)} prompts", file=sys.stderr, flush=True)

    def _take(self, groups: Sequence[Group]) -> None:
        scores = [Scores.of(group, self._reward).known for group in groups]
        if not any(scores):
            verdict = groups[0].samples[0].verdict
            reason = f": {verdict.reason}" if verdict and verdict.reason else ""
            raise RewardError(
                f"none of {len(groups) * self._section.samples} samples has a reward, so no rate is "
                f"known{reason}"
            )
        for group, judged in zip(groups, scores, strict=True):
            rate = SolveRate(len(judged), sum(score >= 1.0 for score in judged))
            self._file.prompts[prompt_id(group.prompt)] = rate


def summary(rates: Sequence[SolveRate], section: DifficultySection) -> str:
    """Return a sentence about the number of prompts within, below and above the limits."""
    counts = Counter(rate.band(section) for rate in rates)
    return (
        f"{len(rates)} prompts: {counts['inside']} within {section.min:g} to {section.max:g}, "
        f"{counts['below']} below, {counts['above']} above, {counts['unknown']} without a reward (kept)"
    )


def _about(config: Config, sampling: Sampling) -> dict[str, Any]:
    drawn = {
        n: getattr(sampling, n) for n in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    }
    ends = {n: list(getattr(config.rollout, n)) for n in ("stop", "stop_token_ids")}
    model = {"model": model_digest(config.model.path), DATE: str(config.model.chat_template_date)}
    rewards = {"samples": sampling.num_samples, REWARD: reward_digest(config.reward)}
    return {**model, **drawn, **rewards} | {n: values for n, values in ends.items() if values}


def reward_digest(section: RewardSection) -> str:
    """Return a digest of what determines rewards: kinds with rules, weights, gates, file contents."""
    by_domain: dict[str, Any] = dict(section.domains)
    if section.kind is not None or section.parts:
        by_domain[""] = section
    rules = {
        domain: [part_contents(part, {*SCORES, str(part.kind)}) for part in spec.verifiers()]
        for domain, spec in by_domain.items()
    }
    contents = [rules, engines] if (engines := engine_contents(section)) else rules
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]


def _resumed(section: DifficultySection, file: RateFile | None, about: Mapping[str, Any]) -> RateFile:
    """Return the existing file, or a new one; raise ConfigError if it does not fit the configuration."""
    path = Path(section.file)
    if file is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RateFile(about, {})
    for name in {**file.about, **about}:
        saved, value = file.about.get(name), about.get(name)
        # None: a file of an earlier release
        if saved != value and not (name in (DATE, REWARD) and saved is None):
            raise ConfigError(
                f"data.difficulty.file {path} was measured with {name} = {saved}, this configuration has "
                f"{value}; set another file"
            )
    return file
