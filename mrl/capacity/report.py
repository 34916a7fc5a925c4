"""A plan as a table for people and a tree for programs. Sizes are decimal gigabytes (1e9 bytes)."""

from __future__ import annotations

import dataclasses
from typing import Any

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Report:
    """What `plan_report` found; `tree` is what `--json` prints."""

    tree: dict[str, Any]

    @property
    def fits(self) -> bool:
        return self.tree["fits"]

    def json(self) -> dict[str, Any]:
        return self.tree

    def table(self) -> str:
        """Sections of text, one per part of the tree."""
        lines = self._head()
        if "training" in self.tree:
            lines += [
                "",
                *self._training(),
                "",
                *self._rollout(),
                "",
                *self._timeline(),
                "",
                *self._sync(),
                "",
                *self._step(),
            ]
        for kind in ("errors", "warnings", "suggestions"):
            if self.tree[kind]:
                lines += ["", f"{kind}:", *(f"  - {line}" for line in self.tree[kind])]
        verdict = "it fits" if self.fits else "it does NOT fit"
        return "\n".join([*lines, "", f"verdict: {verdict}"])

    def _head(self) -> list[str]:
        tree, layout = self.tree, self.tree["layout"]
        axes = " x ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one rank"
        experts = "dealt out" if tree["expert_parallel"] else "cut by tp"
        return [
            f"model     {tree['model']}: {tree['parameters_total']:,} parameters, {tree['parameters_active']:,} active "
            f"(from {tree['model_facts']})",
            f"hardware  {tree['nodes']} nodes of {tree['hardware']['name']}",
            f"training  {tree['world_size']} ranks: {axes}",
            f"rollout   {tree['engines']} engines of tp{tree['rollout_tp']}, experts {experts}",
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
        note = f"microbatches: {training['num_microbatches']} per update, the largest {training['microbatch_tokens']} tokens"
        return [*_columns(rows), note]

    def _rollout(self) -> list[str]:
        rollout = self.tree["rollout"]
        return [
            f"rollout, per rank: weights {_gb(rollout['weights_bytes'] + rollout['derived_bytes'])} GB, "
            f"KV cache {_gb(rollout['kv_cache_bytes'])} GB = {rollout['kv_cache_tokens']:,} tokens "
            f"({rollout['longest_sequences']} sequences of the greatest length)"
        ]

    def _timeline(self) -> list[str]:
        rows = [["memory over a step", "used GB", "free GB", "made of"]]
        for moment in self.tree["memory_timeline"]:
            parts = ", ".join(f"{name} {_gb(size)}" for name, size in moment["parts"].items())
            rows.append([moment["moment"], _gb(moment["total_bytes"]), _gb(moment["free_bytes"]), parts])
        return _columns(rows)

    def _sync(self) -> list[str]:
        sync = self.tree["sync"]
        bounds = ", ".join(
            f"{link} {1e3 * seconds:.0f} ms" for link, seconds in sync["bound_seconds"].items()
        )
        rows = [
            ["one sync, GB", "all slots", "most into one", "most out of one"],
            ["needed", _gb(sync["need_bytes"]), _gb(sync["need_bytes_max"]), ""],
            ["own slot", _gb(sync["local_bytes"]), "", ""],
            [
                "inside nodes",
                *(_gb(sync[k]) for k in ("node_bytes", "node_in_bytes_max", "node_out_bytes_max")),
            ],
            [
                "between nodes",
                *(_gb(sync[k]) for k in ("network_bytes", "network_in_bytes_max", "network_out_bytes_max")),
            ],
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
            f"{step['concurrent_sequences']} sequences at once per engine, pipeline bubble {step['pipeline_bubble']:.0%}",
        ]


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if abs(size) >= GB else f"{size / GB:.3f}"


def _columns(rows: list[list[str]]) -> list[str]:
    """Rows with padded columns; the last one is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
