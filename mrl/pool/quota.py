"""In-flight quota of a run, and the memory that groups in the rollout buffer may take."""

from __future__ import annotations

from mrl.config.root import Config
from mrl.config.sections.shaping import MOST_PROMPTS
from mrl.pool.group_bytes import TOKEN_BYTES
from mrl.pool.ledger import Admission


def admission_rule(config: Config) -> Admission:
    """Return the admission rule; without a filter, groups without a reward are not replaced."""
    batch, section = config.loop.prompts_per_step, config.algorithm.filter
    limit = batch if section is None else min(section.max_rounds * batch, MOST_PROMPTS)
    return Admission(
        batch=batch,
        max_staleness=config.stream.max_staleness,
        sync_every=config.stream.sync_every,
        max_dropped=max(0, limit - batch),
    )


def max_buffer_bytes(config: Config) -> int:
    """Return the approximate bytes of a full quota of groups with the longest prompts and responses."""
    response = config.rollout.max_response_tokens
    sample = 4 * (config.model.max_length - response) + TOKEN_BYTES * response
    return admission_rule(config).slots * config.loop.samples_per_prompt * sample
