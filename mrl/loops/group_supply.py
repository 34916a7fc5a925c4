"""The groups a step trains on: new ones, filtered, refilled within a budget, surplus kept.

Refills come in whole rounds and groups are chosen by prompt index, never by finishing time, so that short responses are
not preferred.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.shaping import MOST_PROMPTS
from mrl.data.prompt_stream import PromptStream
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.screen import Screen
from mrl.loops.staleness import newest_version
from mrl.observe.ledger_log import Standing
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt
from mrl.trajectories.group_messages import decode_group, encode_group


@dataclasses.dataclass(frozen=True, slots=True)
class Supplied:
    """The groups of one step and what is told of them."""

    groups: list[Group]
    """In prompt order; fewer than asked for, possibly none, where the budget is spent."""
    served_version: int
    """The policy version that the engines put on the step's new samples; -1 where surplus made up the whole step."""
    metrics: dict[str, float]


class GroupSupply:
    """Hands out `loop.prompts_per_step` groups a step; knows the stream's position and the surplus."""

    def __init__(self, config: Config, stream: PromptStream, sampling: Sampling) -> None:
        self._config, self._stream, self._sampling = config, stream, sampling
        self._surplus: list[Group] = []
        self._again: list[Prompt] = []
        """Of surplus groups that a checkpoint held without their routes."""
        self._screen = Screen(config)

    def take(self, rollouts: RolloutThread, *, version: int) -> Supplied:
        """The groups of the step that trains `version`. RewardError where too many of its samples have no verdict,
        RolloutError where the budget is spent and the configuration says stop."""
        wanted, kept, rounds = self._config.loop.prompts_per_step, self._surplus, 0
        section = self._config.algorithm.filter
        while len(kept) < wanted and self._within_budget(rounds, self._screen.num_booked):
            missing = wanted - len(kept)
            fresh = rollouts.groups(self._prompts(missing if section is None else wanted), self._sampling)
            with rollouts.clock.phase("filter"):
                screened = self._screen.look(fresh)
                self._screen.book(screened)
                kept = kept + screened.kept
            rounds += 1
        kept = sorted(kept, key=lambda group: group.prompt.index)
        chosen, self._surplus = kept[:wanted], kept[wanted:]
        counts = {
            "group/resampled": float(max(0, self._screen.num_booked - wanted)),
            "group/rounds": float(rounds),
            "group/surplus": float(len(self._surplus)),
        }
        served = self._screen.newest_version()
        metrics = self._screen.close(chosen, version=version, effort=f"{rounds} rounds") | counts
        return Supplied(chosen, served, metrics)

    def take_standing(self) -> Standing:
        """Where the prompts are; what was dropped is told once."""
        surplus = [
            *(group.prompt.index for group in self._surplus),
            *(prompt.index for prompt in self._again),
        ]
        return self._screen.take_standing(surplus, self._stream.position)

    def state(self) -> dict[str, Any]:
        """Position in the data, as JSON values, and the bytes of surplus groups; without samples those that are asked anew."""
        surplus = [*self._surplus, *(Group(prompt, ()) for prompt in self._again)]
        return {"stream": self._stream.state(), "surplus": [encode_group(group) for group in surplus]}

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Goes on there with weights of this version. Surplus groups with tokens of later ones, which no longer exist, are asked
        anew; how many. So are those of another number of samples, and all where passes take the engines' routes, which end with the
        processes that have them."""
        self._stream.restore(state["stream"])
        groups = [decode_group(data, self._stream.prompt_at) for data in state["surplus"]]
        anew = self._config.routing.replay == "engine"
        newer = [group.prompt.index for group in groups if newest_version(group) > version]
        size = self._config.loop.samples_per_prompt
        lost = [anew or len(g.samples) != size or g.prompt.index in newer for g in groups]
        self._again = [group.prompt for group, gone in zip(groups, lost, strict=True) if gone]
        self._surplus = [group for group, gone in zip(groups, lost, strict=True) if not gone]
        return len(newer)

    def _prompts(self, count: int) -> list[Prompt]:
        """The next ones; first those that are asked anew."""
        again, self._again = self._again[:count], self._again[count:]
        return again + self._stream.take(count - len(again))

    def _within_budget(self, rounds: int, num_generated: int) -> bool:
        section = self._config.algorithm.filter
        if section is None:
            return rounds == 0
        return rounds < section.max_rounds and num_generated < MOST_PROMPTS
