"""`mrl make preferences`: make pairs of a better and a worse response per row, ranked by the rewards.

Without samples, the better response is the correct one, if a verifier gives it, and worse ones are corrupted
(mrl/prepare/corruptions.py). With samples, both are the model's: the best and the worst of a group.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.data.load_rows import load_data
from mrl.data.tokenise import load_tokenizer_for
from mrl.errors import ConfigError, DataError
from mrl.launch.commands.one_engine import one_engine
from mrl.launch.commands.this_machine import with_local_models, with_values
from mrl.prepare.arithmetic_rows import write_rows
from mrl.prepare.corruptions import corrupted
from mrl.rewards.kinds.ground_truth import correct_response
from mrl.rewards.trials.probes import Probe, score_probes
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt

FILES = {"train": "pairs.jsonl", "validation": "pairs_validation.jsonl"}
_RIGHT = "right"
_OTHERS = 64
"""Number of rows whose correct responses may be used to corrupt a row's response."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """Options of `mrl make preferences`."""

    out: Path
    samples: int = 0
    """Responses of model.path per row; 0 starts no engine."""
    rows: int | None = None
    """Maximum rows per source of data.train and data.validation."""
    deadline_seconds: float = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one row with different rewards."""

    prompt: Prompt
    better: str
    worse: str
    margin: float
    """Difference of their rewards."""
    tag: str
    """Corruption that made the worse one; "sampled" if both are the model's."""

    def row(self) -> dict[str, Any]:
        """Return the pair as a row for `mrl tune`."""
        prompt = list(self.prompt.messages) if self.prompt.messages else self.prompt.text
        pair = {"prompt": prompt, "chosen": self.better, "rejected": self.worse}
        return pair | {"margin": self.margin, "tag": self.tag, "domain": self.prompt.domain}


def make_preferences(config: Config, options: PreferenceOptions) -> str:
    """Write the pairs of data.train and of data.validation; return a text about them.

    Raises ConfigError for episodes and for too few samples, DataError if no row gives a pair.
    """
    if config.agent is not None:
        raise ConfigError("pairs need single responses, not episodes; remove the section agent")
    if options.samples == 1:
        raise ConfigError("--samples 1: one response is not a pair; set 2 or more, or 0")
    config = with_local_models(config)
    tokenizer = load_tokenizer_for(config.model)
    dataset = load_data(config.data, config.reward, tokenizer)
    print(dataset.report.text(), file=sys.stderr, flush=True)
    numbers = itertools.count()
    prompts = {
        use: [
            dataclasses.replace(row, index=next(numbers))
            for source in sources
            for row in source.rows[: options.rows]
        ]
        for use, sources in (("train", dataset.train), ("validation", dataset.validation))
    }
    pairs = (
        _sampled(config, tokenizer, prompts, options) if options.samples else _made(config, prompts, options)
    )
    if not any(pairs.values()):
        raise DataError("no row gave a pair: no two responses to one row have different rewards")
    options.out.mkdir(parents=True, exist_ok=True)
    for use, made in pairs.items():
        if made:
            write_rows(options.out / FILES[use], (pair.row() for pair in made))
    return "\n".join(f"{options.out / FILES[use]}: {_summary(made)}" for use, made in pairs.items() if made)


def _summary(pairs: Sequence[Pair]) -> str:
    longer = sum(len(pair.better) > len(pair.worse) for pair in pairs)
    shorter = sum(len(pair.better) < len(pair.worse) for pair in pairs)
    ways = ", ".join(f"{count} {way}" for way, count in sorted(Counter(p.tag for p in pairs).items()))
    return f"{len(pairs)} pairs ({ways}); the better response is longer in {longer} and shorter in {shorter}"


def _made(
    config: Config, prompts: dict[str, list[Prompt]], options: PreferenceOptions
) -> dict[str, list[Pair]]:
    rng = random.Random(config.run.seed)
    return {use: list(_of_right(config, rows, rng, options)) for use, rows in prompts.items()}


def _of_right(
    config: Config, prompts: Sequence[Prompt], rng: random.Random, options: PreferenceOptions
) -> Iterator[Pair]:
    """Yield a pair per row, if it has one: the correct response and a random one with a lower reward."""
    right = {p.index: text for p in prompts if (text := correct_response(config.reward, p)) is not None}
    by_domain: dict[str, list[str]] = {}
    for prompt in prompts:
        if prompt.index in right:
            by_domain.setdefault(prompt.domain, []).append(right[prompt.index])
    probes = []
    for prompt in (p for p in prompts if p.index in right):
        correct, others = right[prompt.index], by_domain[prompt.domain]
        probes.append(Probe(_RIGHT, prompt, correct))
        near = rng.sample(others, min(_OTHERS, len(others)))
        probes += [Probe(name, prompt, text) for name, text in corrupted(correct, near, rng).items()]
    results = score_probes(config.reward, probes, deadline_seconds=options.deadline_seconds)
    for _, group in itertools.groupby(results, key=lambda probe: probe.prompt.index):
        best, *corruptions = group
        worse = [
            p
            for p in corruptions
            if None not in (p.value, best.value) and (p.value or 0.0) < (best.value or 0.0)
        ]
        if worse:
            other = rng.choice(worse)
            margin = (best.value or 0.0) - (other.value or 0.0)
            yield Pair(best.prompt, best.response, other.response, margin, other.name)


def _sampled(
    config: Config, tokenizer: Any, prompts: dict[str, list[Prompt]], options: PreferenceOptions
) -> dict[str, list[Pair]]:
    rng, sampling = random.Random(config.run.seed), Sampling.of(config)
    sampling = dataclasses.replace(sampling, num_samples=options.samples)
    pairs: dict[str, list[Pair]] = {}
    config, _ = with_values(config)
    with one_engine(config, tokenizer, None, group_size=options.samples) as rollouts:
        for use, rows in prompts.items():
            groups = rollouts.generate_in_order(rows, sampling)
            pairs[use] = [pair for group in groups for pair in _best_and_worst(group, rng)]
    return pairs


def _best_and_worst(group: Group, rng: random.Random) -> Iterator[Pair]:
    """Yield a random pair of a best and a worst response; nothing if all have the same reward."""
    values = {s.response_text: s.verdict.value for s in group.samples if s.verdict and s.has_reward}
    known = {text: value for text, value in values.items() if value is not None and text}
    if not known or min(known.values()) == max(known.values()):
        return
    most, least = max(known.values()), min(known.values())
    better = rng.choice(sorted(text for text, value in known.items() if value == most))
    worse = rng.choice(sorted(text for text, value in known.items() if value == least))
    yield Pair(group.prompt, better, worse, most - least, "sampled")
