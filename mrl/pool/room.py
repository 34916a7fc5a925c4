"""How many groups of a run may be on their way at once, and about the bytes that they come to where they wait."""

from __future__ import annotations

from mrl.config.root import Config
from mrl.config.sections.shaping import MOST_PROMPTS
from mrl.pool.group_bytes import TOKEN_BYTES
from mrl.pool.ledger import Admission


def admission_of(config: Config) -> Admission:
    """The rule of a run; without a filter nothing is admitted in the place of a group without a reward, as under on_policy."""
    batch, section = config.loop.prompts_per_step, config.algorithm.filter
    limit = batch if section is None else min(section.max_rounds * batch, MOST_PROMPTS)
    return Admission(
        batch=batch,
        max_age=config.stream.max_age,
        sync_every=config.stream.sync_every,
        most_fruitless=max(0, limit - batch),
    )


def most_bytes(config: Config) -> int:
    """About what the groups come to where every slot has one of longest prompts and responses."""
    response = config.rollout.max_response_tokens
    sample = 4 * (config.model.max_length - response) + TOKEN_BYTES * response
    return admission_of(config).slots * config.loop.samples_per_prompt * sample
