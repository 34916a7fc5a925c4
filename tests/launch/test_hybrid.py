"""The hybrid engine in several layouts: engines, trainer and export agree after updates and syncs."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.root import Config
from mrl.config.sections.launch import LaunchSection
from mrl.errors import WorkerLost
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.colocated import Hybrid
from tests.launch.hybrid_runs import agree, asked, come, long_requests, rollouts_of, running, tiny_config
from tests.support.draft_folders import add_drafts
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

DP2 = ("rollout.dp=2", "rollout.tp=1", "rollout.expert_parallel=true")
"""One engine on both slots, with its experts divided among its dp ranks."""
LORA = "training.lora={rank: 4, targets: [attention, routed_experts]}"
REPLAY = "routing.replay=engine"
"""Settings with which trainer and engines agree at every token."""
LAYOUTS = {
    "tp2-ep2-to-1": ("training.layout={tp: 2, pp: 1, ep: 2, dp: 1}", "rollout.tp=1"),
    "pp2-to-2": ("training.layout={tp: 1, pp: 2, ep: 1, dp: 1}", "rollout.tp=2"),
    "ep2-dp2-to-2-offloaded": ("training.layout={tp: 1, pp: 1, ep: 2, dp: 2}", "rollout.tp=2",
        "training.offload=always"),
    "cp2-ep2-to-dp2": ("training.layout={tp: 1, pp: 1, cp: 2, ep: 2, dp: 1}", *DP2),
}  # fmt: skip
DRAFTS = "training.drafts=trained"
FAMILIES = {"deepseek_v3": ("training.layout={tp: 2, pp: 1, ep: 2, dp: 1}", *DP2, DRAFTS)}
"""Model type -> its settings; the folder has a draft head, and its correction biases are not zero."""
SLOW_LAYOUTS = {
    "1-to-own-2-twice": (
        "training.layout={tp: 1, pp: 1, ep: 1, dp: 1}",
        "rollout.tp=2",
        "launch.engine_slots=4",
    ),
    "pp2-vpp2-to-1-distributed": (
        "training.layout={tp: 1, pp: 2, vpp: 2, ep: 1, dp: 1}",
        "rollout.tp=1",
        "sync.transport=distributed",
    ),
    "ep2-dp2-to-own-dp2-tp2": (
        "training.layout={tp: 1, pp: 1, ep: 2, dp: 1, cp: 2}",
        "rollout={dp: 2, tp: 2, expert_parallel: true}",
        "launch.engine_slots=4",
    ),
    "tp2-etp2-to-1-nixl": (
        "training.layout={tp: 2, pp: 1, ep: 1, etp: 2, dp: 1}",
        "rollout.tp=1",
        "sync.transport=nixl",
    ),
    "lora-cp2-ep2-to-2-offloaded": (
        "training.layout={tp: 1, pp: 1, cp: 2, ep: 2, dp: 1}", LORA,
        "rollout.tp=2", "training.offload=always",
    ),
}  # fmt: skip
"""Each transport, engine layout and trainer axis that the merge suite leaves out, once."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with cluster(LaunchSection(object_store_bytes=80 << 20), num_slots=6):
        yield


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)]
)
def test_engines_trainer_and_export_agree_after_updates(layout, task, ray_cluster, tmp_path) -> None:
    check_agreement(tiny_config(task / "model", task, REPLAY, *(LAYOUTS | SLOW_LAYOUTS)[layout]), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_agree_after_updates(family, task, ray_cluster, tmp_path) -> None:
    folder = write_model(tmp_path / family, family, hidden_size=64, head_dim=64, moe_intermediate_size=64)
    add_drafts(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(task / "model" / name, folder / name)
    config = tiny_config(folder, task, REPLAY, *FAMILIES[family])
    check_agreement(config, tmp_path)


def check_agreement(config: Config, folder: Path) -> None:
    with running(config, folder / "logs") as hybrid:
        agree(hybrid, config, folder)
        if config.rollout.dp > 1:
            lose_a_rank(hybrid, signal.SIGKILL, "engine 0, dp rank 1 died in phase")


def lose_a_rank(hybrid: Hybrid, how: signal.Signals, message: str) -> None:
    """Send a signal to the first engine's second dp rank while it generates; check that it is named."""
    pid = hybrid.rollout.on_all(lambda actor: os.getpid())[1]
    future = asked(hybrid, long_requests())
    rollouts_of(hybrid).resume()
    os.kill(pid, how)
    try:
        with pytest.raises(WorkerLost, match=message):
            come(hybrid, future)
    finally:
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_dp_rank_that_stands_still_is_named(task: Path, ray_cluster: None, tmp_path: Path) -> None:
    """The rank that waits names it after rollout.step_deadline_seconds, before the phase's deadline."""
    words = ("training.layout={tp: 1, pp: 1, ep: 2, dp: 2}", *DP2, "rollout.step_deadline_seconds=60")
    config = tiny_config(task / "model", task, *words, "loop.phase_deadline_seconds=600")
    with running(config, tmp_path / "logs") as hybrid:
        hybrid.sync(0)
        lose_a_rank(hybrid, signal.SIGSTOP, "engine 0, dp rank 1 kept others waiting in phase")
