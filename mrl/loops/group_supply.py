"""Groups for each step: generate, filter, refill within a budget, keep the surplus.

Refills come in whole rounds. Groups are chosen by prompt index: finishing time favours short responses."""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.shaping import MOST_PROMPTS
from mrl.data.prompt_stream import PromptStream
from mrl.loops.group_filter import GroupFilter
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.staleness import newest_version
from mrl.observe.ledger_log import InFlightPrompts
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt
from mrl.trajectories.group_messages import decode_group, encode_group


@dataclasses.dataclass(frozen=True, slots=True)
class Supplied:
    """Groups of one step and their metrics."""

    groups: list[Group]
    """In prompt order; fewer than loop.prompts_per_step, possibly none, if the budget is spent."""
    served_version: int
    """Policy version that the engines reported for the step's new samples; -1 if all groups are surplus."""
    metrics: dict[str, float]


class GroupSupply:
    """Supplier of `loop.prompts_per_step` groups per step; keeps the data position and the surplus."""

    def __init__(self, config: Config, stream: PromptStream, sampling: Sampling) -> None:
        self._config, self._stream, self._sampling = config, stream, sampling
        self._surplus: list[Group] = []
        self._redo: list[Prompt] = []
        """Prompts of restored surplus groups that must be generated again."""
        self._screen = GroupFilter(config)

    def take(self, rollouts: RolloutThread, *, version: int) -> Supplied:
        """Return the groups of the step that trains `version`; RewardError if too many have no verdict."""
        wanted, kept, rounds = self._config.loop.prompts_per_step, self._surplus, 0
        section = self._config.algorithm.filter
        while len(kept) < wanted and self._within_budget(rounds, self._screen.num_booked):
            missing = wanted - len(kept)
            fresh = rollouts.groups(self._prompts(missing if section is None else wanted), self._sampling)
            with rollouts.clock.phase("filter"):
                screened = self._screen.filter(fresh)
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
        metrics = self._screen.finish_step(chosen, version=version, effort=f"{rounds} rounds") | counts
        return Supplied(chosen, served, metrics)

    def take_standing(self) -> InFlightPrompts:
        """Return where the prompts are; dropped prompts are reported once."""
        surplus = [*(group.prompt.index for group in self._surplus), *(prompt.index for prompt in self._redo)]
        return self._screen.take_standing(surplus, self._stream.position)

    def state(self) -> dict[str, Any]:
        """Return the data position as JSON values and the surplus groups as bytes, empty if to be redone."""
        surplus = [*self._surplus, *(Group(prompt, ()) for prompt in self._redo)]
        return {"stream": self._stream.state(), "surplus": [encode_group(group) for group in surplus]}

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Continue from `state` with weights of `version`; return how many groups have tokens of later ones.

        These are generated again. So are groups with another number of samples, and all groups if passes
        replay the engines' routes, which are lost with the engines' processes."""
        self._stream.restore(state["stream"])
        groups = [decode_group(data, self._stream.prompt_at) for data in state["surplus"]]
        loses_routes = self._config.routing.replay == "engine"
        newer = [group.prompt.index for group in groups if newest_version(group) > version]
        size = self._config.loop.samples_per_prompt
        lost = [loses_routes or len(g.samples) != size or g.prompt.index in newer for g in groups]
        self._redo = [group.prompt for group, is_lost in zip(groups, lost, strict=True) if is_lost]
        self._surplus = [group for group, is_lost in zip(groups, lost, strict=True) if not is_lost]
        return len(newer)

    def _prompts(self, count: int) -> list[Prompt]:
        """Return the next prompts, first those to be generated again."""
        redo, self._redo = self._redo[:count], self._redo[count:]
        return redo + self._stream.take(count - len(redo))

    def _within_budget(self, rounds: int, num_generated: int) -> bool:
        section = self._config.algorithm.filter
        if section is None:
            return rounds == 0
        return rounds < section.max_rounds and num_generated < MOST_PROMPTS
