"""A capacity estimate as a table for people and a tree for programs. Sizes are in gigabytes of 1e9 bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.capacity.advice import advise
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import Hardware
from mrl.capacity.memory_timeline import Event
from mrl.capacity.phase_deadlines import most_rounds
from mrl.capacity.running_ahead import running_ahead
from mrl.config.root import Config

GB = 1e9


def capacity_report(config: Config, hardware: Hardware) -> CapacityReport:
    """Says whether `config` fits `hardware` and what a step costs. ConfigError where the model is unknown.

    What `mrl train` would refuse gives a report of its errors alone.
    """
    estimate = Estimate(config, hardware)
    head = _head_tree(estimate)
    if estimate.unmet:
        return CapacityReport(
            head | {"fits": False, "errors": estimate.unmet, "warnings": [], "suggestions": []}
        )
    advice = advise(estimate)
    parts = {
        "fits": not advice.errors,
        "training": _training_tree(estimate),
        "rollout": _rollout_tree(estimate),
        "memory_timeline": _memory_tree(estimate),
        "host_memory": [_moment_tree(moment) for moment in estimate.host],
        "sync": _sync_tree(estimate),
        "checkpoint": dataclasses.asdict(estimate.saving),
        "export": dataclasses.asdict(estimate.exporting),
        "step": _step_tree(estimate),
    }
    return CapacityReport(head | parts | dataclasses.asdict(advice))


def _head_tree(estimate: Estimate) -> dict[str, Any]:
    config, facts, layout = estimate.config, estimate.facts, estimate.layout
    return {
        "model": config.model.path,
        "model_facts": facts.origin,
        "parameters_total": facts.parameters_total,
        "parameters_active": facts.parameters_active,
        "hardware": estimate.hardware.model_dump(),
        "layout": dataclasses.asdict(layout),
        "world_size": layout.world_size,
        "slots": config.num_slots,
        "nodes": -(-config.num_slots // estimate.hardware.gpus_per_node),
        "engines": config.num_engines,
        "engine_slots": config.launch.engine_slots,
        "rollout_tp": config.rollout.tp,
        "rollout_dp": config.rollout.dp,
        "expert_parallel": config.rollout.expert_parallel,
        "quantization": config.rollout.quantization,
    }


def _training_tree(estimate: Estimate) -> dict[str, Any]:
    tokens, count = estimate.microbatches
    stages = [
        {
            "parameters": rank.policy.parameters,
            "weights_bytes": rank.policy.weights,
            "gradients_bytes": rank.policy.gradients,
            "optimizer_bytes": rank.policy.optimizer,
            "critic_bytes": rank.critic.total,
            "activations_bytes": rank.activations.kept,
            "working_bytes": rank.activations.working,
            "microbatches_in_flight": rank.activations.microbatches_in_flight,
            "total_bytes": rank.total,
        }
        for rank in estimate.stages
    ]
    return {
        "stages": stages,
        "fullest_stage": estimate.fullest_stage,
        "microbatch_tokens": tokens,
        "num_microbatches": count,
    }


def _rollout_tree(estimate: Estimate) -> dict[str, Any]:
    engine = estimate.engine
    return {
        "weights_bytes": engine.weights,
        "derived_bytes": engine.derived,
        "kv_cache_bytes": max(0, engine.kv_cache),
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "kv_cache_tokens": engine.kv_cache_tokens,
        "longest_sequences": engine.kv_cache_tokens // estimate.config.model.max_length,
    }


def _memory_tree(estimate: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "event": event.name,
            "parts": event.parts,
            "total_bytes": event.total,
            "free_bytes": event.free,
            "fits": event.free >= 0,
        }
        for event in estimate.timeline
    ]


def _moment_tree(moment: Event) -> dict[str, Any]:
    return {
        "moment": moment.name,
        "parts": moment.parts,
        "total_bytes": moment.total,
        "free_bytes": moment.free,
    }


def _sync_tree(estimate: Estimate) -> dict[str, Any]:
    traffic = estimate.traffic
    return {
        "need_bytes": sum(traffic.need),
        "need_bytes_max": max(traffic.need),
        "local_bytes": sum(traffic.local),
        "between_slots_bytes": traffic.between_slots,
        "node_bytes": sum(traffic.node_in),
        "network_bytes": sum(traffic.network_in),
        "node_in_bytes_max": max(traffic.node_in),
        "network_in_bytes_max": max(traffic.network_in),
        "node_out_bytes_max": max(traffic.node_out),
        "network_out_bytes_max": max(traffic.network_out),
        "off_rail_bytes": traffic.off_rail,
        "bound_seconds": traffic.bound_seconds(estimate.hardware),
        "seconds": estimate.sync_seconds,
    }


def _step_tree(estimate: Estimate) -> dict[str, Any]:
    total, tokens = sum(estimate.seconds.values()), estimate.work.tokens
    rounds = most_rounds(estimate.config)
    return {
        "seconds": estimate.seconds | {"total": total},
        "tokens": tokens,
        "tokens_per_second_per_slot": tokens / total / estimate.config.num_slots,
        "concurrent_sequences": estimate.generation.concurrent,
        "decode_steps": estimate.generation.decode_steps,
        "pipeline_bubble": estimate.training_time.bubble,
        "most_rounds": rounds,
        "longest_seconds": total + (rounds - 1) * estimate.seconds["generate"],
        "running_ahead": [dataclasses.asdict(ahead) for ahead in running_ahead(estimate)],
        "deadlines": [dataclasses.asdict(wait) for wait in estimate.waits],
    }


@dataclasses.dataclass(frozen=True)
class CapacityReport:
    """A capacity estimate to be shown; `tree` is what `--json` prints."""

    tree: dict[str, Any]

    @property
    def fits(self) -> bool:
        """Whether nothing was found that prevents a run."""
        return self.tree["fits"]

    def table(self) -> str:
        """Sections of text, one per part of the tree."""
        lines = self._head()
        if "training" in self.tree:
            for section in (
                self._training,
                self._rollout,
                self._memory,
                self._host,
                self._sync,
                self._files,
                self._step,
            ):
                lines += ["", *section()]
        for kind in ("errors", "warnings", "suggestions"):
            if self.tree[kind]:
                lines += ["", f"{kind}:", *(f"  - {line}" for line in self.tree[kind])]
        verdict = "it fits" if self.fits else "it does NOT fit"
        return "\n".join([*lines, "", f"verdict: {verdict}"])

    def _head(self) -> list[str]:
        tree, layout = self.tree, self.tree["layout"]
        axes = " x ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one rank"
        experts = "dealt out" if tree["expert_parallel"] else "cut by tp"
        own = f" on {tree['engine_slots']} slots of their own" if tree["engine_slots"] else ""
        ranks = f"dp{tree['rollout_dp']} x " * (tree["rollout_dp"] > 1) + f"tp{tree['rollout_tp']}"
        weights = "" if tree["quantization"] == "none" else f", weights in {tree['quantization']}"
        return [
            f"model     {tree['model']}: {tree['parameters_total']:,} parameters, {tree['parameters_active']:,} active "
            f"(from {tree['model_facts']})",
            f"hardware  {tree['nodes']} nodes of {tree['hardware']['name']}",
            f"training  {tree['world_size']} ranks: {axes}",
            f"rollout   {tree['engines']} engines of {ranks}{own}, experts {experts}{weights}",
        ]

    def _training(self) -> list[str]:
        training = self.tree["training"]
        names = ["weights", "gradients", "optimizer", "critic", "activations", "working", "total"]
        if not any(stage["critic_bytes"] for stage in training["stages"]):
            names.remove("critic")
        rows = [["training, GB per rank", *names]]
        for number, stage in enumerate(training["stages"]):
            mark = " (fullest)" if number == training["fullest_stage"] else ""
            rows.append([f"stage {number}{mark}", *(_gb(stage[f"{name}_bytes"]) for name in names)])
        count, tokens = training["num_microbatches"], training["microbatch_tokens"]
        note = f"microbatches: {count} per update, the largest {tokens} tokens"
        return [*_columns(rows), note]

    def _rollout(self) -> list[str]:
        rollout = self.tree["rollout"]
        return [
            f"rollout, per rank: weights {_gb(rollout['weights_bytes'] + rollout['derived_bytes'])} GB, "
            f"KV cache {_gb(rollout['kv_cache_bytes'])} GB = {rollout['kv_cache_tokens']:,} tokens "
            f"({rollout['longest_sequences']} sequences of the greatest length)"
        ]

    def _memory(self) -> list[str]:
        rows = [["memory over a step", "used GB", "free GB", "made of"]]
        for event in self.tree["memory_timeline"]:
            parts = ", ".join(f"{name} {_gb(size)}" for name, size in event["parts"].items())
            rows.append([event["event"], _gb(event["total_bytes"]), _gb(event["free_bytes"]), parts])
        return _columns(rows)

    def _host(self) -> list[str]:
        rows = [["host memory of a node", "used GB", "free GB", "made of"]]
        for moment in self.tree["host_memory"]:
            parts = ", ".join(f"{name} {_gb(size)}" for name, size in moment["parts"].items())
            rows.append([moment["moment"], _gb(moment["total_bytes"]), _gb(moment["free_bytes"]), parts])
        return _columns(rows)

    def _files(self) -> list[str]:
        saved, exported = self.tree["checkpoint"], self.tree["export"]
        return [
            f"a checkpoint: {_gb(saved['num_bytes'])} GB, at most {_gb(saved['node_bytes'])} GB of them by one node, "
            f"{saved['seconds']:.0f} s",
            f"an export: {_gb(exported['num_bytes'])} GB by one process with {_gb(exported['host_bytes'])} GB of host memory, "
            f"{exported['seconds']:.0f} s",
        ]

    def _sync(self) -> list[str]:
        sync = self.tree["sync"]
        bounds = ", ".join(f"{name} {1e3 * bound:.0f} ms" for name, bound in sync["bound_seconds"].items())

        def link(name: str) -> list[str]:
            return [_gb(sync[f"{name}_{kind}"]) for kind in ("bytes", "in_bytes_max", "out_bytes_max")]

        rows = [
            ["one weight sync, GB", "all slots", "most into one", "most out of one"],
            ["needed", _gb(sync["need_bytes"]), _gb(sync["need_bytes_max"]), ""],
            ["own slot", _gb(sync["local_bytes"]), "", ""],
            ["inside nodes", *link("node")],
            ["between nodes", *link("network")],
        ]
        return [*_columns(rows), f"at full bandwidth: {bounds}; estimate {sync['seconds']:.2f} s"]

    def _step(self) -> list[str]:
        step = self.tree["step"]
        seconds = ", ".join(
            f"{phase} {value:.1f}" for phase, value in step["seconds"].items() if phase != "total"
        )
        return [
            f"step, estimated seconds: {step['seconds']['total']:.0f} = {seconds}",
            f"{step['tokens'] / 1e6:.1f} M tokens, {step['tokens_per_second_per_slot']:.0f} tokens/s per slot, "
            f"{step['concurrent_sequences']} sequences at once per engine, "
            f"pipeline bubble {step['pipeline_bubble']:.0%}",
            f"with all of its {step['most_rounds']} rounds of generation: {step['longest_seconds']:.0f} s",
            *self._running_ahead(),
            "seconds of deadline: "
            + ", ".join(f"{w['name']} {w['seconds']:.0f} of {w['deadline']:.0f}" for w in step["deadlines"]),
        ]

    def _running_ahead(self) -> list[str]:
        gains = [
            f"{a['speed_up']:.2f} with max_age {a['max_age']}" for a in self.tree["step"]["running_ahead"]
        ]
        if not gains:
            return []
        return [
            f"loop.schedule=stream, times the speed of on_policy: {', '.join(gains)} (docs/running-ahead.md)"
        ]


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if abs(size) >= GB else f"{size / GB:.3f}"


def _columns(rows: list[list[str]]) -> list[str]:
    """Pads the columns of rows, but for the last one."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
