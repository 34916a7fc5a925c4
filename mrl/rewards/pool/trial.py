"""Sample of a response that no policy generated, to try a verifier or to score it offline."""

from __future__ import annotations

import numpy as np

from mrl.samples import Prompt, Sample, Status

TRIAL_RESPONSE = "0"


def trial_sample(prompt: Prompt, response: str = TRIAL_RESPONSE) -> Sample:
    """Return a finished sample of a prompt with one token."""
    one = np.zeros(1, np.int32)
    return Sample(
        prompt_index=prompt.index,
        sample_index=0,
        prompt_tokens=prompt.tokens,
        response_tokens=one,
        loss_mask=one.astype(bool),
        rollout_logprobs=one.astype(np.float32),
        policy_versions=one,
        status=Status.FINISHED,
        response_text=response,
        domain=prompt.domain,
        tag=prompt.tag,
    )
