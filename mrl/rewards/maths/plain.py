"""The maths verifier as a plain function, for callers without a pool.

verify("... so \\boxed{\\frac{1}{2}}", "0.5").value == 1.0
"""

from __future__ import annotations

import dataclasses
import time

from mrl.config.sections.reward import MathsRules
from mrl.rewards.maths.verifier import NAME, VERSION, verify_exactly
from mrl.rewards.pool.killable import symbolic_process
from mrl.samples import Verdict


def verify(response: str, ground_truth: str, rules: MathsRules = MathsRules()) -> Verdict:  # noqa: B008  (frozen)
    """Verify one response. Answers that are no plain numbers are compared in a separate process that is killed at its
    deadline; the process starts on first need and ends with this one."""
    start = time.monotonic()
    verdict = verify_exactly(response, ground_truth, rules)
    if verdict is None:
        verdict = symbolic_process().compare(response, ground_truth, rules)
    return dataclasses.replace(verdict, verifier=NAME, version=VERSION, seconds=time.monotonic() - start)
