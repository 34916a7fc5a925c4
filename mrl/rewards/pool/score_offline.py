"""Offline scoring of given responses by the reward workers, without engines: rows in, verdicts out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.errors import DataError
from mrl.rewards.kinds.ground_truth import parse_ground_truth
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Sample, Verdict


def score(
    reward: RewardSection, rows: Sequence[Mapping[str, Any]], *, deadline_seconds: float = 600.0
) -> list[Verdict]:
    """Return the verdict of each row's response, in order; the reward workers end with the call.

    A row has `response`, the `ground_truth` that its verifier needs (as in a data file) and optionally
    `prompt` (a text or messages), `domain` and `tag`. Verifiers see all columns but response and prompt as
    metadata, as in a run. Rows with the same domain and prompt form one group. If a verifier fails on a row,
    the verdict's value is None and its reason the error.

    Raises:
        DataError: A row cannot be scored; raised before any is scored.
        RewardError: A verifier broke its contract, or the deadline passed.
    """
    pairs = list(_samples(reward, rows))
    with RewardPool(reward, group_size=len(pairs) + 1) as pool:  # so that groups start only when flushed
        verdicts = pool.score_all(pairs, deadline_seconds=deadline_seconds)
    return [verdicts[sample.sample_id] for sample, _ in pairs]


def _samples(reward: RewardSection, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Sample, Prompt]]:
    """Yield each row's response as a sample, with its prompt."""
    prompts: dict[tuple[str, str], int] = {}
    sizes: dict[int, int] = {}
    for number, row in enumerate(rows, 1):
        place = f"row {number}"
        if not isinstance(row.get("response"), str):
            raise DataError(f"{place}: column `response` must be a text; the row's columns: {', '.join(row)}")
        prompt = prompt_of(reward, row, row.get("ground_truth"), place=place)
        index = prompts.setdefault((prompt.domain, prompt.text or place), len(prompts))
        prompt = dataclasses.replace(prompt, index=index)
        sample = trial_sample(prompt, row["response"])
        yield dataclasses.replace(sample, sample_index=sizes.get(index, 0)), prompt
        sizes[index] = sizes.get(index, 0) + 1


def prompt_of(reward: RewardSection, row: Mapping[str, Any], answer: Any, *, place: str) -> Prompt:
    """Return a row's prompt (index 0), with the ground truth that its verifier parses from `answer`.

    Raises:
        DataError: The verifier cannot use the answer; names the place.
    """
    raw = row.get("prompt", "")
    messages = tuple(raw) if isinstance(raw, list | tuple) else ()
    text = "\n".join(str(message.get("content") or "") for message in messages)
    domain = str(row.get("domain", "default"))
    return Prompt(
        index=0,
        tokens=np.zeros(0, np.int32),
        text=text if messages else str(raw),
        ground_truth=parse_ground_truth(answer, domain=domain, section=reward, place=place),
        domain=domain,
        tag=str(row.get("tag", "")),
        row=place,
        metadata={name: value for name, value in row.items() if name not in ("prompt", "response")},
        messages=messages,
    )
