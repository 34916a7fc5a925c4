"""Block-quantised engines: a weight sync brings what vLLM reads from a folder quantised by the same rule."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import BLOCK, SCALES
from mrl.resharding.planner import quantised
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import fp8
from tests.engines import host_of
from tests.mrl.rollout import driving
from tests.resharding.feeding import Feeder, read
from tests.resharding.leasing import LeasedRank, spread
from tests.resharding.vllm.sessions import described, planned_session, sync_weights
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration
SHAPE = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
SYNC = SyncSection(bucket_bytes=256 << 10, deadline_seconds=30.0)
ASKED = driving.requests(12, seed=3, ignore_stop=True)


def rewrite(source: Path, target: Path, *, keep_quantised: bool) -> Path:
    """Write the folder with quantised linear weights, or with those made wide again as engines do."""
    weights = dict(fp8.whole_tensors(load_file(source / "model.safetensors").items(), BLOCK))
    config = json.loads((source / "config.json").read_text())
    if keep_quantised:
        config["quantization_config"] = quantised.engine_settings(config["num_hidden_layers"])
    else:
        for name in [n for n in weights if n.endswith(SCALES)]:
            scales = weights.pop(name)
            base = name.removesuffix(SCALES)
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weights[base] = weights[base].float() * wide
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file({n: w.contiguous() for n, w in weights.items()}, target / "model.safetensors", {"format": "pt"})
    return target


def test_brought_by_boxes_whole_and_read_from_a_folder_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "wide", dtype=torch.bfloat16, **SHAPE, seed=4)
    other = write_model(tmp_path / "other", dtype=torch.bfloat16, **SHAPE, seed=5)
    narrow = rewrite(folder, tmp_path / "narrow", keep_quantised=True)
    reader = host_of(narrow, engine={"real_weights": True}, dtype="bfloat16")
    expected = [a.logprobs.tolist() for a in reader.call(driving.generate, ASKED)]
    reader.close()

    host = host_of(folder, dtype="bfloat16", quantization="fp8_block")
    feeder = Feeder(host.call(driving.addresses), SYNC, full=True)
    weights = read(folder)
    (tensors,) = spread(weights, 1)
    plan = build_plan(
        [RankManifest.of(0, tensors)],
        described(host, folder),
        Topology.shared(1),
        PlanOptions(bucket_bytes=SYNC.bucket_bytes),
    )
    linear = sum(w.numel() for n, w in weights.items() if quantised.quantises(n))
    kept = sum(w.nbytes for n, w in weights.items() if not quantised.quantises(n))
    assert not plan.whole_tensors and plan.summary()["bytes_needed"] == linear + linear // 128**2 * 4 + kept
    trainer = LeasedRank(tensors, list(weights.values()))
    assert planned_session(host, trainer, feeder, plan) == []
    answers = host.call(driving.generate, ASKED)
    assert [a.logprobs.tolist() for a in answers] == expected

    assert not sync_weights(host, feeder, other).errors
    assert [a.logprobs.tolist() for a in host.call(driving.generate, ASKED)] != expected
    assert not sync_weights(host, feeder, folder).errors
    assert [a.logprobs.tolist() for a in host.call(driving.generate, ASKED)] == expected
    trainer.close()
    host.call(driving.release)
    feeder.close()
    host.close()
    wide = rewrite(folder, tmp_path / "as_computed", keep_quantised=False)
    near, far = (driving.middle_gap(reference, ASKED, answers) for reference in (wide, folder))
    assert near < 0.1 < far, (near, far)
