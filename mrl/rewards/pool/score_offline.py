"""Responses of anywhere through the reward workers, without engines: rows in, verdicts out."""

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
    """The verdict on each row's response, in order, by reward workers that end with the call.

    A row has `response`, the `ground_truth` that its verifier needs (as a file of data has it), and where they matter
    `prompt` (a text or messages), `domain`, `tag`. All its columns but response and prompt are metadata, which verifiers see, as
    in a run. Rows that share domain and prompt
    are one group, for verifiers that score whole groups. Raises DataError for a row that cannot be scored, before
    any is, and RewardError for what breaks a verifier's contract and past the deadline. A verifier that failed on a
    row gives a verdict whose value is None and whose reason says why.
    """
    pairs = list(_samples(reward, rows))
    with RewardPool(reward, group_size=len(pairs) + 1) as pool:  # no group is whole before it is said to be
        verdicts = pool.score_all(pairs, deadline_seconds=deadline_seconds)
    return [verdicts[sample.sample_id] for sample, _ in pairs]


def _samples(reward: RewardSection, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Sample, Prompt]]:
    """Each row's response as a sample, with its prompt."""
    prompts: dict[tuple[str, str], int] = {}
    sizes: dict[int, int] = {}
    for number, row in enumerate(rows, 1):
        place = f"row {number}"
        if not isinstance(row.get("response"), str):
            raise DataError(f"{place}: a text is needed under `response`; its columns: {', '.join(row)}")
        prompt = prompt_of(reward, row, row.get("ground_truth"), place=place)
        index = prompts.setdefault((prompt.domain, prompt.text or place), len(prompts))
        prompt = dataclasses.replace(prompt, index=index)
        sample = trial_sample(prompt, row["response"])
        yield dataclasses.replace(sample, sample_index=sizes.get(index, 0)), prompt
        sizes[index] = sizes.get(index, 0) + 1


def prompt_of(reward: RewardSection, row: Mapping[str, Any], answer: Any, *, place: str) -> Prompt:
    """A row's prompt, the first one, with the ground truth that its verifier makes of its answer. Raises DataError, which names the
    place, for one that it cannot use."""
    asked = row.get("prompt", "")
    messages = tuple(asked) if isinstance(asked, list | tuple) else ()
    said = "\n".join(str(message.get("content") or "") for message in messages)
    domain = str(row.get("domain", "default"))
    return Prompt(
        index=0,
        tokens=np.zeros(0, np.int32),
        text=said if messages else str(asked),
        ground_truth=parse_ground_truth(answer, domain=domain, section=reward, place=place),
        domain=domain,
        tag=str(row.get("tag", "")),
        row=place,
        metadata={name: value for name, value in row.items() if name not in ("prompt", "response")},
        messages=messages,
    )
