"""The symbolic maths verifier for callers without a pool: one process of its own, killed at the deadline
and ended when nobody has asked for a while."""

from __future__ import annotations

import functools
import threading

import numpy as np

from mrl.config.sections.reward import MathsRules, RewardSection
from mrl.errors import RewardError
from mrl.rewards.pool.pool import RewardPool
from mrl.samples import Prompt, Sample, Status, Verdict

_IDLE_SECONDS = 5.0


class SymbolicProcess:
    """One comparison at a time; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, RewardPool] = {}
        self._count = 0

    def compare(
        self, response: str, ground_truth: str, rules: MathsRules, *, deadline_seconds: float = 10.0
    ) -> Verdict:
        """The verdict of the symbolic verifier."""
        with self._lock:
            self._count += 1
            pool = self._pool(rules, deadline_seconds)
            sample, prompt = _wrapped(response, ground_truth, self._count)
            pool.submit(sample, prompt)
            for _, verdict in pool.collect(3 * deadline_seconds + 120.0):
                return verdict
        raise RewardError("maths: the symbolic process gave no verdict")

    def _pool(self, rules: MathsRules, deadline_seconds: float) -> RewardPool:
        key = f"{deadline_seconds}|{rules.model_dump_json()}"
        if key not in self._pools:
            section = RewardSection(
                kind="maths",
                maths=rules,
                pool_workers=1,
                deadline_seconds=deadline_seconds,
                idle_seconds=_IDLE_SECONDS,
            )
            self._pools[key] = RewardPool(section)
        return self._pools[key]


@functools.lru_cache(maxsize=1)
def symbolic_process() -> SymbolicProcess:
    """The one of this process, started on first need."""
    return SymbolicProcess()


def _wrapped(response: str, ground_truth: str, number: int) -> tuple[Sample, Prompt]:
    empty = np.zeros(0, np.int32)
    sample = Sample(
        prompt_index=number,
        sample_index=0,
        prompt_tokens=empty,
        response_tokens=empty,
        loss_mask=empty.astype(bool),
        rollout_logprobs=empty.astype(np.float32),
        policy_versions=empty,
        status=Status.FINISHED,
        response_text=response,
    )
    return sample, Prompt(index=number, tokens=empty, text="", ground_truth=ground_truth)
