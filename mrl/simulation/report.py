"""`mrl plan --stream`: what a configuration and the best choice would be like, as a table for people and a tree for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.capacity.hardware import Hardware
from mrl.capacity.step_time import work_of
from mrl.config.load import load as load_config
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.pool.room import admission_of
from mrl.simulation.calibrate import RunPlaces, calibrated
from mrl.simulation.forecast import Choice, Forecast, Placements, Planner
from mrl.simulation.load import Load, log_normal
from mrl.simulation.places import Places

AGES = 4
"""Largest age that is tried where nobody says."""


def planned(
    config: Config,
    hardware: Hardware,
    *,
    most_age: int = AGES,
    mean: float | None = None,
    sigma: float = 0.9,
    filtered: float = 0.0,
    every_choice: bool = False,
) -> StreamPlan:
    """The plan of a configuration on its own slots, from the capacity estimate's times.

    `mean`: tokens of a response, after the cut at rollout.max_response_tokens; None takes the hardware's
    mean_response_fraction of the longest. `sigma`: deviation of the lengths' logarithm. `filtered`: share of the groups that
    the run's filter drops. `every_choice`: simulates all, beside the search. ConfigError for what cannot be.
    """
    longest = config.rollout.max_response_tokens
    if mean is not None:
        hardware = hardware.model_copy(update={"mean_response_fraction": mean / longest})
    if not (0 < hardware.mean_response_fraction < 1 and sigma >= 0 and 0 <= filtered < 1 and most_age >= 0):
        raise ConfigError(
            f"mrl plan --stream: --mean {mean} must be between 0 and rollout.max_response_tokens = {longest}, --sigma {sigma} "
            f"and --max-age {most_age} at least 0, --filtered {filtered} at least 0 and below 1"
        )
    work, places = work_of(config, hardware), Places(config, hardware)
    draw = log_normal(config.loop.samples_per_prompt, mean=work.response_tokens, sigma=sigma, most=longest)
    load = Load(draw, prompt_tokens=round(work.prompt_tokens), filtered=filtered, seed=config.run.seed)
    origin = f"capacity estimate on {hardware.name}; lengths log-normal, mean {work.response_tokens:,.0f}, sigma {sigma:g}"
    return plan_of(config, places, load, origin, most_age=most_age, every_choice=every_choice)


def planned_from(
    config: Config, folder: Path, *, most_age: int = AGES, every_choice: bool = False
) -> StreamPlan:
    """The plan of a configuration on its own slots, from the times that a run in `folder` took; it may differ from the run's in
    all but the model."""
    run = load_config([folder / "config.yaml"])
    found = calibrated(run, folder, asked=config)
    places = RunPlaces(config, found.leaves, trainer_slots=run.training.layout.world_size)
    origin = f"times and lengths of {found.steps} steps of {folder}"
    return plan_of(config, places, found.load, origin, most_age=most_age, every_choice=every_choice)


def plan_of(
    config: Config,
    places: Placements,
    load: Load,
    origin: str,
    *,
    most_age: int,
    every_choice: bool,
) -> StreamPlan:
    """Simulates the configuration itself, on_policy on shared slots, and what is advised."""
    _require_simulated(config)
    planner = Planner(places, admission_of(config), load)
    own = config.launch.engine_slots
    is_stream = config.loop.schedule == "stream"
    asked = Choice(config.stream.max_age if is_stream else 0, own, planner.capacity(own))
    base = Choice(0, 0, planner.capacity(0)) if 0 in set(places) else dataclasses.replace(asked, max_age=0)
    advised = planner.advised(most_age)
    runs = planner.simulated
    return StreamPlan(
        origin=origin,
        base=planner.forecast(base),
        asked=planner.forecast(asked),
        advised=advised,
        others=planner.worth(advised.choice, most_age),
        problems=places.problems(advised.choice.engine_slots),
        simulated=runs,
        best=planner.exhaustive(most_age) if every_choice else None,
    )


def _require_simulated(config: Config) -> None:
    """ConfigError for what a simulated run would get wrong in silence."""
    if config.agent is not None:
        raise ConfigError(
            "mrl plan --stream knows no environments: turns and their latencies are not simulated; remove the section agent to "
            "see single responses"
        )
    if config.loop.schedule == "stream" and config.stream.in_flight != "recompute":
        raise ConfigError(
            f"mrl plan --stream simulates stream.in_flight=recompute alone, not {config.stream.in_flight}"
        )


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """What was simulated."""

    origin: str
    """Where times and lengths come from."""
    base: Forecast
    """on_policy on shared slots, which everything is compared with."""
    asked: Forecast
    """The configuration itself."""
    advised: Forecast
    others: list[Forecast]
    """What the search simulated, in order."""
    problems: list[str]
    """Why nothing would start, where no placement does; else none."""
    simulated: int
    """Runs of the search."""
    best: Forecast | None
    """The best of every choice, where all were simulated."""

    @property
    def tree(self) -> dict[str, Any]:
        """JSON values."""
        tree = dataclasses.asdict(self)
        for found in (tree["base"], tree["asked"], tree["advised"], *tree["others"]):
            found["speed_up"] = found["tokens_per_second"] / self.base.tokens_per_second
        return tree

    def table(self) -> str:
        """The choices line by line, and what to do."""
        rows = [("on_policy", self.base)]
        rows += [("this configuration", self.asked)] * (self.asked != self.base)
        rows += [("", e) for e in self.others if e not in (self.base, self.asked, self.advised)]
        rows.append(("advised", self.advised))
        if self.best is not None:
            rows.append(("best of all", self.best))
        lines = [f"simulated: {self.origin}", "", _head(), *(self._line(*row) for row in rows), ""]
        return "\n".join([*lines, *_told(self.advised), *self._settings(), *self._problems()])

    def _line(self, name: str, found: Forecast) -> str:
        speed_up = found.tokens_per_second / self.base.tokens_per_second
        values = [
            format(value, form) for value, (_, form) in zip(_values(found, speed_up), COLUMNS, strict=True)
        ]
        return f"{name:<20}" + "".join(f"{value:>10}" for value in values)

    def _settings(self) -> list[str]:
        choice = self.advised.choice
        gain = self.advised.tokens_per_second / self.base.tokens_per_second
        if gain < 1.05:
            return [
                f"not worth it: {gain:.2f} times on_policy on shared slots; keep loop.schedule: on_policy"
            ]
        text = (
            f"loop.schedule=stream stream.max_age={choice.max_age} launch.engine_slots={choice.engine_slots}"
        )
        return [
            f"{gain:.2f} times on_policy: {text} rollout.max_num_seqs={choice.concurrency}, and training.layout.dp for the "
            "slots that are left"
        ]

    def _problems(self) -> list[str]:
        return [f"but: {line}" for line in self.problems]


COLUMNS: tuple[tuple[str, str], ...] = (
    ("own slots", "d"),
    ("max_age", "d"),
    ("at once", "d"),
    ("step s", ".1f"),
    ("speed-up", ".2f"),
    ("tokens/s", ",.0f"),
    ("trainer", ".0%"),
    ("engines", ".0%"),
    ("waits", ".0%"),
    ("held", ".0%"),
    ("age", ".2f"),
)
"""(heading, format)."""


def _head() -> str:
    return f"{'':<20}" + "".join(f"{heading:>10}" for heading, _ in COLUMNS)


def _values(found: Forecast, speed_up: float) -> Sequence[Any]:
    choice = found.choice
    return (
        choice.engine_slots,
        choice.max_age,
        choice.concurrency,
        found.step_seconds,
        speed_up,
        found.tokens_per_second,
        found.trainer_busy,
        found.engines_busy,
        found.waits_for_responses + found.waits_for_verdicts,
        found.engines_held,
        found.age_mean,
    )


def _told(found: Forecast) -> list[str]:
    """Who waits for whom, and the ages, in words."""
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in found.ages.items())
    waits = found.waits_for_responses + found.waits_for_verdicts
    who = (
        "trainer and engines take equally long"
        if max(waits, found.engines_held) < 0.05
        else "the trainer waits for responses"
        if waits >= found.engines_held
        else "engines wait for admission, which the trainer holds"
    )
    return [
        "trainer, engines: share of the time that they work; waits: the trainer's for groups; held: engines without a prompt",
        f"advised: {who}; tokens by age {ages} (bound {found.age_bound})",
    ]
