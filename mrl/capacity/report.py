"""Show a capacity estimate: a summary of at most ten lines, then tables. Sizes are in GB of 1e9 bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mrl.capacity.advice import Advice, advise
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import Hardware
from mrl.capacity.memory_timeline import Event
from mrl.capacity.phase_deadlines import most_rounds
from mrl.config.root import Config

GB = 1e9


def capacity_report(config: Config, hardware: Hardware) -> CapacityReport:
    """Check whether `config` fits `hardware` and estimate a step's cost; raise ConfigError if the model is
    unknown.

    If `mrl train` would refuse the configuration, the report contains only its errors.
    """
    estimate = Estimate(config, hardware)
    if estimate.unmet:
        return CapacityReport(estimate, Advice(errors=estimate.unmet, warnings=[], suggestions=[]))
    return CapacityReport(estimate, advise(estimate))


@dataclasses.dataclass(frozen=True)
class CapacityReport:
    """Capacity estimate to be printed."""

    estimate: Estimate
    advice: Advice

    @property
    def fits(self) -> bool:
        """True if nothing prevents a run."""
        return not self.advice.errors

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the slots take."""
        return -(-self.estimate.config.num_slots // self.estimate.hardware.gpus_per_node)

    def table(self) -> str:
        """Return the summary and then sections of text, one per part of the estimate."""
        lines, estimate = self._summary(), self.estimate
        if not estimate.unmet:
            for section in (
                self._training(),
                self._rollout(),
                _memory("memory over a step", estimate.timeline),
                _memory("host memory of a node", estimate.host),
                self._sync(),
                self._files(),
                *[self._step(), self._assumptions()] * estimate.hardware.has_speeds,
            ):
                lines += ["", *section]
        for kind, lines_of_kind in dataclasses.asdict(self.advice).items():
            if lines_of_kind:
                lines += ["", f"{kind}:", *(f"  - {line}" for line in lines_of_kind)]
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        """Return the verdict, the fullest moment, seconds, and what to change first."""
        advice, estimate = self.advice, self.estimate
        error = advice.errors[0] if advice.errors else ""
        lines = [f"verdict   {f'it does NOT fit: {error}' if error else 'it fits'}", *self._head()]
        if not estimate.unmet:
            lines += [self._fullest(), *self._speed()]
        if first := next(iter([*advice.suggestions, *advice.warnings] if error else advice.warnings), ""):
            lines.append(f"change    first: {first}")
        return lines

    def _fullest(self) -> str:
        """Return the moments with least free memory, of a slot and of a node's host."""
        estimate = self.estimate
        moments = (min(events, key=lambda event: event.free) for events in (estimate.timeline, estimate.host))
        return "memory    fullest: " + ", ".join(
            f"{place} in '{moment.name}', {_gb(moment.total)} of {_gb(moment.total + moment.free)} GB"
            for place, moment in zip(("GPU" if estimate.on_gpus else "slot", "host"), moments, strict=True)
        )

    def _speed(self) -> list[str]:
        estimate, seconds = self.estimate, self.estimate.seconds
        if not estimate.hardware.has_speeds:
            return ["step      no seconds: the speed of this machine is unknown; loop.steps=3 measures it"]
        total, tokens = sum(seconds.values()), estimate.work.tokens
        shares = ", ".join(
            f"{phase} {value / total:.0%}" for phase, value in seconds.items() if value >= 0.01 * total
        )
        low, high = (sum(ends) for ends in zip(*estimate.seconds_range.values(), strict=True))
        return [
            f"step      {total:,.0f} s estimated ({shares}); {low:,.0f} to {high:,.0f} s from the ranges of "
            f"its assumptions, at responses of {estimate.work.response_tokens:,.0f} tokens",
            f"speed     {tokens / total / estimate.config.num_slots:,.0f} tokens/s per slot, "
            f"{tokens / 1e6:.1f} M tokens per step",
        ]

    def _head(self) -> list[str]:
        config, facts, layout = self.estimate.config, self.estimate.facts, self.estimate.layout
        rollout, own_slots = config.rollout, config.launch.engine_slots
        axes = " x ".join(f"{axis}{size}" for axis, size in dataclasses.asdict(layout).items() if size > 1)
        experts = "distributed" if rollout.expert_parallel else "split by tp"
        engine_slots = f" on their own {own_slots} slots" if own_slots else ""
        ranks = f"dp{rollout.dp} x " * (rollout.dp > 1) + f"tp{rollout.tp}"
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        weights = "" if rollout.quantization == "none" else f", weights in {rollout.quantization}"
        return [
            f"model     {config.model.path}: {facts.parameters_total:,} parameters, "
            f"{facts.parameters_active:,} active (from {facts.origin})",
            f"hardware  {nodes}{self.estimate.hardware.name}",
            f"training  {layout.world_size} ranks: {axes or 'one rank'}",
            f"rollout   {config.num_engines} engines of {ranks}{engine_slots}, experts {experts}{weights}",
        ]

    def _training(self) -> list[str]:
        stages, (tokens, count) = self.estimate.stages, self.estimate.microbatches
        columns = [
            {
                "weights": rank.policy.weights,
                "gradients": rank.policy.gradients,
                "optimizer": rank.policy.optimizer,
                "critic": rank.critic.total,
                "activations": rank.activations.kept,
                "working": rank.activations.working,
                "total": rank.total,
            }
            for rank in stages
        ]
        names = [name for name in columns[0] if name != "critic" or any(column[name] for column in columns)]
        rows = [["training, GB per rank", *names]]
        for number, sizes in enumerate(columns):
            mark = " (fullest)" if number == self.estimate.fullest_stage else ""
            rows.append([f"stage {number}{mark}", *(_gb(sizes[name]) for name in names)])
        return [*_columns(rows), f"micro-batches: {count} per update, the largest {tokens} tokens"]

    def _rollout(self) -> list[str]:
        engine = self.estimate.engine
        longest = engine.kv_cache_tokens // self.estimate.config.model.max_length
        return [
            f"rollout, per rank: weights {_gb(engine.weights + engine.derived)} GB, "
            f"KV cache {_gb(max(0, engine.kv_cache))} GB = {engine.kv_cache_tokens:,} tokens "
            f"({longest} sequences of maximum length)"
        ]

    def _files(self) -> list[str]:
        saved, exported = self.estimate.saving, self.estimate.exporting
        has_speeds = self.estimate.hardware.has_speeds
        return [
            f"a checkpoint: {_gb(saved.num_bytes)} GB, at most {_gb(saved.node_bytes)} GB of them from one "
            "node" + has_speeds * f", {saved.seconds:.0f} s",
            f"an export: {_gb(exported.num_bytes)} GB by one process with {_gb(exported.host_bytes)} GB of "
            "host memory" + has_speeds * f", {exported.seconds:.0f} s",
        ]

    def _sync(self) -> list[str]:
        traffic, seconds = self.estimate.traffic, self.estimate.seconds["sync"]
        bounds = ", ".join(
            f"{name} {1e3 * bound:.0f} ms"
            for name, bound in traffic.bound_seconds(self.estimate.hardware).items()
        )

        def link(received: Sequence[int], sent: Sequence[int]) -> list[str]:
            return [_gb(sum(received)), _gb(max(received)), _gb(max(sent))]

        rows = [
            ["one weight sync, GB", "all slots", "most into one", "most out of one"],
            ["needed", _gb(sum(traffic.need)), _gb(max(traffic.need)), ""],
            ["own slot", _gb(sum(traffic.local)), "", ""],
            ["inside nodes", *link(traffic.node_in, traffic.node_out)],
            ["between nodes", *link(traffic.network_in, traffic.network_out)],
        ]
        speeds = [f"at full bandwidth: {bounds}; estimate {seconds:.2f} s"]
        return _columns(rows) + speeds * self.estimate.hardware.has_speeds

    def _step(self) -> list[str]:
        estimate, seconds = self.estimate, self.estimate.seconds
        rounds, hardware = most_rounds(self.estimate.config), self.estimate.hardware
        longest = sum(seconds.values()) + (rounds - 1) * seconds["generate"]
        rows = [["one step, seconds", "estimated", "range", "made of"]]
        for phase, parts in estimate.step_time.phases.items():
            low, high = estimate.seconds_range[phase]
            made_of = ", ".join(f"{part.name} {part.seconds:,.1f}" for part in parts)
            rows.append([phase, f"{seconds[phase]:,.1f}", f"{low:,.1f} to {high:,.1f}", made_of])
        return [
            *_columns(rows),
            f"{estimate.generation.concurrent} sequences at once per engine, "
            f"{1e3 * estimate.generation.step_seconds:.1f} ms per decode step, pipeline bubble "
            f"{estimate.step_time.training.bubble:.0%}",
            f"with all of its {rounds} rounds of generation: {longest:,.0f} s; the first step, with cold "
            f"caches: {hardware.compile_seconds:,.0f} s more (compile_seconds)",
            "phase deadlines, seconds: "
            + ", ".join(f"{w.name} {w.seconds:.0f} of {w.deadline:.0f}" for w in estimate.waits),
        ]

    def _assumptions(self) -> list[str]:
        """Return each assumption that the seconds rest on, most seconds first."""
        hardware, users = self.estimate.hardware, dict[str, dict[str, float]]()
        for phase, parts in self.estimate.step_time.phases.items():
            for part in parts:
                for name in part.assumptions:
                    by_phase = users.setdefault(name, {})
                    by_phase[phase] = by_phase.get(phase, 0.0) + part.seconds
        rows = [["assumption", "value", "worst to best", "seconds that rest on it"]]
        for name, seconds in sorted(users.items(), key=lambda item: -sum(item[1].values())):
            ends = " to ".join(f"{end:.3g}" for end in hardware.ranges.get(name, ()))
            resting = ", ".join(f"{phase} {value:,.1f}" for phase, value in seconds.items())
            rows.append([name, f"{getattr(hardware, name):.3g}", ends or "-", resting])
        return _columns(rows)


def _memory(title: str, events: Sequence[Event]) -> list[str]:
    rows = [[title, "used GB", "free GB", "made of"]]
    rows += [[event.name, _gb(event.total), _gb(event.free), _parts(event.parts)] for event in events]
    return _columns(rows)


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if abs(size) >= GB else f"{size / GB:.3f}"


def _columns(rows: list[list[str]]) -> list[str]:
    """Pad all columns of the rows but the last."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
