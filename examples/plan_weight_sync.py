"""Plan a weight sync as a library: what moves between slots, for any layouts, without a model or a GPU."""

import json

from mrl.files import CONFIGS
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology

model = json.loads((CONFIGS / "models/Qwen3-30B-A3B/config.json").read_text())
trainer = Layout(tp=4, ep=8, dp=2)  # eight trainer ranks
engines = Layout(tp=2, dp=4)  # four engines of two ranks, on the same eight GPUs

plan = build_plan(
    trainer_manifests.trainer_rank_manifests(model, trainer),
    engine_manifests.engine_rank_manifests(model, engines),
    Topology.shared(8),
    PlanOptions(bucket_bytes=256 << 20),
)
summary = plan.summary()
crossing = summary["bytes_intra_node"] + summary["bytes_inter_node"]
print(f"engines need {summary['bytes_needed'] / 1e9:.1f} GB in {summary['windows']} windows")
print(f"already on the slot: {summary['bytes_local'] / 1e9:.1f} GB, crossing slots: {crossing / 1e9:.1f} GB")
print(f"lower bound of what must cross: {summary['lower_bound_cross_slot_bytes'] / 1e9:.1f} GB")
first = plan.part(0).windows[0]
print(
    f"slot 0, window 0: {len(first.sends)} sends, {len(first.receives)} receives, {len(first.local)} copies"
)
