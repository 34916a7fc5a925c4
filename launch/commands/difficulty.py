"""`mrl difficulty`: how often a model folder solves each training prompt, with no more samples than it takes to know on which
side of a band its rate lies. One engine, no trainer, no Ray; a measurement that was ended goes on where it was."""

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

from mrl.algorithms.solve_rate import Band, SolveRate
from mrl.config.root import Config
from mrl.config.sections.data import SAMPLES_A_LOOK, DifficultySection
from mrl.data.difficulty import Measured, RateFile, band_of, prompt_id
from mrl.data.load_rows import load_data
from mrl.data.tokenise import tokenizer_of
from mrl.errors import ConfigError, RewardError
from mrl.files import held, put_aside
from mrl.launch.commands import started
from mrl.launch.commands.acting import look_at
from mrl.launch.commands.contents import engine_contents, model_digest, part_contents
from mrl.launch.commands.one_engine import one_engine
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.validate import Scores
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt

DATE, REWARD = "chat_template_date", "reward"
SCORES = frozenset({"kind", "path", "engine", "server", "style", "group", "min_reward", "weight", "gate"})
"""Settings of a verifier that decide its score, besides its kind's rules."""
PROMPTS_A_WRITE = 256
"""Prompts whose figures are written down together."""


def measure_difficulty(config: Config) -> str:
    """Writes `data.difficulty.file`; what was found, in sentences. A sample solves its prompt where its reward, or the first of
    the named parts of it, is at least 1, as in pass@k.

    ConfigError for a band that so many samples cannot decide on, and for a file of another model or sampling; all of it
    is said before the engine starts.
    """
    section = _section(config)
    with held(Path(section.file), "data.difficulty.file"):
        return _measure(config, section)


def _measure(config: Config, section: DifficultySection) -> str:
    band = band_of(section)
    damaged: list[bytes] = []
    begun = RateFile.read(section.file, damaged=damaged) if Path(section.file).exists() else None
    config = started.dated(config, begun and begun.about.get(DATE))
    tokenizer = tokenizer_of(config.model)
    acting = look_at(config, tokenizer)
    unchosen = config.data.model_copy(update={"difficulty": None})
    dataset = load_data(unchosen, config.reward, tokenizer, tools=acting.tools_of if acting else None)
    print(dataset.report.text(), file=sys.stderr, flush=True)
    prompts = list({prompt_id(p): p for source in dataset.train for p in source.rows}.values())
    sampling = dataclasses.replace(Sampling.of(config), num_samples=SAMPLES_A_LOOK)
    file = _begun(section, begun, _about(config, sampling))
    if damaged:
        put_aside(Path(section.file), damaged)
    survey = Survey(prompts, file, section, sampling, config.reward)
    if survey.waiting():
        with one_engine(config, tokenizer, acting, group_size=SAMPLES_A_LOOK) as rollouts:
            survey.run(rollouts)
    file.write(section.file, prompts, band)
    return summary(
        [file.prompts[prompt_id(p)].rate for p in prompts], band, group=config.loop.samples_per_prompt
    )


class Survey:
    """Asks about prompts, some at a time, until each one's rate is known."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        file: RateFile,
        section: DifficultySection,
        sampling: Sampling,
        reward: RewardSection,
    ) -> None:
        self._prompts = [dataclasses.replace(prompt, index=place) for place, prompt in enumerate(prompts)]
        self._file, self._sampling, self._reward = file, sampling, reward
        self._section, self._band = section, band_of(section)
        self._num_asked = sum(known.asked for known in file.prompts.values())

    def waiting(self) -> list[Prompt]:
        """Those that need more samples, in order."""
        return self._still(self._prompts)

    def _still(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of them that need more samples. Each look at a prompt has an index of its own, and so seeds of its own, the same
        ones whatever was ended and resumed before."""
        found = []
        for prompt in prompts:
            known = self._known(prompt)
            if known.asked < self._section.samples and self._band.place(known.rate) == "unknown":
                look, place = known.asked // SAMPLES_A_LOOK, prompt.index % len(self._prompts)
                found.append(dataclasses.replace(prompt, index=look * len(self._prompts) + place))
        return found

    def run(self, rollouts: RolloutThread) -> None:
        """Asks until nothing waits; the file is written on the way."""
        path = Path(self._section.file)
        begun = [p for p in self._prompts if prompt_id(p) in self._file.prompts]
        self._file.write(path, begun, self._band)  # a last line without its end is gone, others can follow
        waiting = self.waiting()
        num_known = len(self._prompts) - len(waiting)
        while waiting:
            further = []
            for groups in itertools.batched(rollouts.in_turn(waiting, self._sampling), PROMPTS_A_WRITE):
                self._take(groups)
                with path.open("a", encoding="utf-8") as stream:
                    stream.writelines(self._file.line(group.prompt, self._band) for group in groups)
                further += (unknown := self._still([group.prompt for group in groups]))
                num_known += len(groups) - len(unknown)
                self._say(num_known)
            waiting = further

    def _take(self, groups: Sequence[Group]) -> None:
        scores = [Scores.of(group, self._reward).known for group in groups]
        if not any(scores):
            verdict = groups[0].samples[0].verdict
            reason = f": {verdict.reason}" if verdict and verdict.reason else ""
            raise RewardError(
                f"none of {len(groups) * SAMPLES_A_LOOK} samples has a reward, so that no rate is known{reason}"
            )
        for group, judged in zip(groups, scores, strict=True):
            known = self._known(group.prompt)
            solved = sum(score >= 1.0 for score in judged)
            rate = SolveRate(known.rate.samples + len(judged), known.rate.solved + solved)
            self._file.prompts[prompt_id(group.prompt)] = Measured(known.asked + len(group.samples), rate)
            self._num_asked += len(group.samples)

    def _known(self, prompt: Prompt) -> Measured:
        return self._file.prompts.get(prompt_id(prompt), Measured(0, SolveRate(0, 0)))

    def _say(self, num_known: int) -> None:
        print(
            f"difficulty: {num_known} of {len(self._prompts)} prompts, {self._num_asked} samples",
            file=sys.stderr,
            flush=True,
        )


def summary(rates: Sequence[SolveRate], band: Band, *, group: int) -> str:
    """How many prompts lie where, what it cost, and what leaving some out is worth to groups of this size."""
    places = [band.place(rate) for rate in rates]
    counts = Counter(places)
    kept = [
        rate for rate, place in zip(rates, places, strict=True) if place == "inside" or place == "unknown"
    ]
    return "\n".join(
        [
            f"{len(rates)} prompts: {counts['inside']} within {band.low:g} to {band.high:g}, {counts['below']} below, "
            f"{counts['above']} above, {counts['unknown']} not decided (kept); "
            f"{_mean([rate.samples for rate in rates]):.1f} samples a prompt",
            f"groups of {group} with right and wrong samples, expected: {_gradients(rates, group):.3f} of all prompts, "
            f"{_gradients(kept, group):.3f} of those that are kept",
        ]
    )


def _gradients(rates: Sequence[SolveRate], group: int) -> float:
    return _mean([rate.with_gradient(group) for rate in rates])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _section(config: Config) -> DifficultySection:
    section = config.data.difficulty
    if section is None:
        raise ConfigError(
            "mrl difficulty writes data.difficulty.file, which is not given; for instance data.difficulty.file=rates.jsonl"
        )
    band, most = band_of(section), section.samples
    for name, value, extreme in (("min", section.min, 0), ("max", section.max, most)):
        if value not in (0.0, 1.0) and band.place(SolveRate(most, extreme)) == "unknown":
            raise ConfigError(
                f"data.difficulty.{name} = {value:g}: {extreme} right of data.difficulty.samples = {most} do not tell with "
                f"{band.confidence:.0%} confidence on which side of it a prompt lies; raise samples, or widen the band"
            )
    return section


def _about(config: Config, sampling: Sampling) -> dict[str, Any]:
    drawn = {
        n: getattr(sampling, n) for n in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    }
    ends = {n: list(getattr(config.rollout, n)) for n in ("stop", "stop_token_ids")}
    model = {"model": model_digest(config.model.path), DATE: str(config.model.chat_template_date)}
    rewards = {REWARD: reward_digest(config.reward)}
    return {**model, **drawn, **rewards} | {n: own for n, own in ends.items() if own}


def reward_digest(section: RewardSection) -> str:
    """Return a digest of what decides the rewards of each domain: kinds with their rules, weights and gates, what files hold."""
    by_domain: dict[str, Any] = dict(section.domains)
    if section.kind is not None or section.parts:
        by_domain[""] = section
    rules = {
        domain: [part_contents(part, {*SCORES, str(part.kind)}) for part in spec.verifiers()]
        for domain, spec in by_domain.items()
    }
    decides = [rules, engines] if (engines := engine_contents(section)) else rules
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _begun(section: DifficultySection, file: RateFile | None, about: Mapping[str, Any]) -> RateFile:
    """The file as far as it goes; a new one where there is none."""
    path = Path(section.file)
    if file is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return RateFile(about, {})
    for name in {**file.about, **about}:
        saved, value = file.about.get(name), about.get(name)
        if saved != value and not (name in (DATE, REWARD) and saved is None):  # of an earlier release
            raise ConfigError(
                f"data.difficulty.file {path} was measured with {name} = {saved}, this configuration has {value}; name another file"
            )
    return file
