"""Groups in the making: what a checkpoint holds of them goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mrl.loops.collect import sampling_of
from mrl.loops.in_flight import InFlight
from mrl.observe.phases import PhaseClock
from mrl.pool.group_bytes import decode_group, encode_group
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Status, Verdict
from tests.mrl.loops.table_policy import EvenIsRight, TableEngines, config_of

PROMPTS = [Prompt(n, np.array([n], np.int32), "", None) for n in range(4)]


class Hesitant(EvenIsRight):
    """Keeps every third verdict back until it is told."""

    keeps_back = True

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        verdicts = super().collect(timeout_seconds)
        if not self.keeps_back:
            return verdicts
        self._verdicts = verdicts[::3]
        return [verdict for number, verdict in enumerate(verdicts) if number % 3]


def groups_of(in_flight: InFlight, sampling: Sampling) -> list[Group]:
    """All of them, whole."""
    in_flight.go_on([], sampling)
    for _ in range(20):
        in_flight.poll(0.0)
    return [in_flight.take(prompt.index) for prompt in PROMPTS]


def test_half_made_groups_go_on_from_their_bytes(tmp_path: Path) -> None:
    """Whole and judged, whole, begun and waiting responses: each ends as it does where nothing was interrupted."""
    config = config_of(tmp_path, {})
    sampling, parts = sampling_of(config), []
    for _ in range(2):
        engines, rewards = TableEngines(config), Hesitant()
        engines.sync(0)
        engines.tokens_per_poll, engines.at_once = 1, 5
        in_flight = InFlight(engines, rewards, PhaseClock(), run_seed=0)
        parts.append((in_flight, rewards))
    (first, rewards), (second, _) = parts
    first.ask(PROMPTS, sampling)
    for _ in range(6):
        first.poll(0.0)
    first.park()
    made = [first.partial(prompt.index) for prompt in PROMPTS]
    samples = [sample for group in made for sample in group.samples]
    kinds = {(s.status is Status.PARKED, s.verdict is None) for s in samples}
    assert kinds == {(True, True), (False, True), (False, False)} and len(samples) < 16
    second.restore([decode_group(encode_group(group), PROMPTS.__getitem__) for group in made], sampling)
    for _, rewards in parts:
        rewards.keeps_back = False
    ours, theirs = (groups_of(in_flight, sampling) for in_flight, _ in parts)
    assert [encode_group(group) for group in ours] == [encode_group(group) for group in theirs]
    assert any(len(sample.segments) > 1 for group in ours for sample in group.samples)
