"""python -m benchmarks.step CONFIG ...: a step of the loop against its floor, in the same processes, dtype and threads.

Floor: one generate call per engine for the batch, the update of the same packed batch and, where the step has it, the pass before
it, called alone and back to back. The step has scoring, packing, advantages, the weight sync and all orchestration besides. Validation and saves are in
neither. Steps and floors alternate, so that a change of the machine's speed hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.bench_run import measured_rows
from mrl.cli.common import CONFIG_HELP
from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.launch.commands.assemble import Parts
from mrl.loops.learn import denominators
from mrl.loops.schedule import Schedule
from mrl.loops.screen import trainable
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt
from mrl.training.batch import pack
from mrl.training.pass_options import PassOptions


def bench_step(config: Config, *, num_steps: int = 5) -> dict[str, Any]:
    """Medians of `num_steps` steps and floors after one warm-up of each, in seconds, and their ratio. ConfigError for a
    schedule without such a floor."""
    if config.loop.schedule != "on_policy":
        raise ConfigError(f"benchmarks.step measures loop.schedule = on_policy, not {config.loop.schedule}")
    floors: list[dict[str, float]] = []

    def measured(parts: Parts, loop: Schedule) -> None:
        floors.extend(_Bench(parts, loop).run(num_steps + 1))

    rows = measured_rows(config, measured, num_steps=2 * (num_steps + 1))
    return _figures(rows[1:], floors[1:])


class _Bench:
    def __init__(self, parts: Parts, loop: Schedule) -> None:
        self._parts, self._loop = parts, loop
        self._groups: Sequence[Group] = ()

    def run(self, count: int) -> list[dict[str, float]]:
        """Alternates: a step (its row goes to metrics.jsonl), then the floor of the same batch, which counts as a step too."""
        self._loop.on_batch = self._remember
        self._loop.start()
        floors = []
        for _ in range(count):
            self._loop.step()
            floors.append(self._floor())
            self._loop.next_step += 1
            self._parts.hybrid.sync(self._loop.version)
        return floors

    def _remember(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    def _floor(self) -> dict[str, float]:
        parts = self._parts
        options = PassOptions(temperature=parts.config.rollout.temperature)
        start = time.monotonic()
        self._generate([group.prompt for group in self._groups])
        generated = time.monotonic()
        parts.hybrid.rest()
        batch = pack(trainable(self._groups), with_routes=parts.config.routing.replay == "engine")
        packed = time.monotonic()
        if parts.config.algorithm.recomputes_policy:
            forward = parts.hybrid.train.forward(batch, options)
            batch = batch.with_arrays(old_logprobs=forward["logprobs"])
        forwarded = time.monotonic()
        batch = batch.with_arrays(advantages=np.zeros(batch.num_tokens, np.float32))
        packed_again = time.monotonic()
        parts.hybrid.train.update(batch, denominators(batch), options)
        return {
            "generate": generated - start,
            "recompute": forwarded - packed,
            "update": time.monotonic() - packed_again,
        }

    def _generate(self, prompts: list[Prompt]) -> None:
        """All requests of the batch in one call per engine, which returns when all are finished."""
        config = self._parts.config
        requests = Sampling.of(config).requests(prompts)
        self._parts.hybrid.rollout.generate(requests, config.loop.phase_deadline_seconds)


def _figures(rows: list[dict[str, Any]], floors: list[dict[str, float]]) -> dict[str, Any]:
    steps = [float(row["time/step_seconds"]) for row in rows]
    totals = [sum(floor.values()) for floor in floors]
    phases = sorted(
        {name for row in rows for name in row if name.startswith("time/")} - {"time/step_seconds"}
    )
    return {
        "step_seconds": statistics.median(steps),
        "floor_seconds": statistics.median(totals),
        "ratio": statistics.median(s / f for s, f in zip(steps, totals, strict=True)),
        "step_phases": {n[5:-8]: statistics.median(float(r.get(n, 0.0)) for r in rows) for n in phases},
        "floor_phases": {n: statistics.median(f[n] for f in floors) for n in floors[0]},
        "steps": steps,
        "floors": totals,
    }


def step_table(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'phase':<12}{'step s':>10}{'floor s':>10}"]
    for name in dict.fromkeys([*figures["floor_phases"], *figures["step_phases"]]):
        step, floor = figures["step_phases"].get(name, 0.0), figures["floor_phases"].get(name, 0.0)
        lines.append(f"{name:<12}{step:>10.3f}{floor:>10.3f}")
    lines.append(f"{'all':<12}{figures['step_seconds']:>10.3f}{figures['floor_seconds']:>10.3f}")
    lines.append(f"step / floor = {figures['ratio']:.2f} (median of {len(figures['steps'])})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("config", nargs="+", help=CONFIG_HELP)
    parser.add_argument("--steps", type=int, default=5, help="measured, after one of warm-up")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_intermixed_args(arguments)
    figures = bench_step(load_config(*options.config), num_steps=options.steps)
    print(json.dumps(figures, indent=1) if options.json else step_table(figures))


if __name__ == "__main__":
    main()
