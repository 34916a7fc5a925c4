"""Optimizer state in host memory: bitwise equal weights, nothing on the device between updates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.sections.training import OptimizerSection
from mrl.training import host_state
from mrl.training.optimizer import Optimizer
from mrl.training.platform.host_copies import HostCopies
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.mrl.training import scenarios
from tests.ranks import run_ranks
from tests.support.recorded_cuda import DEVICE, RecordedCuda
from tests.support.transformer_engine import FOLDER
from tests.tiny_models import write_model

PIECE = 40_000
"""Bytes: some twenty pieces of a tiny model's rank."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    recorder = RecordedCuda()
    recorder.install(monkeypatch)
    return recorder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return write_model(folder, dtype=getattr(torch, request.param)), request.param


def worker(
    rank: int,
    world: int,
    port: int,
    folder: str,
    layout: dict[str, int],
    fraction: float,
    changes: dict[str, Any],
) -> MegatronWorker:
    host_state.PIECE_BYTES = PIECE
    section = OptimizerSection(lr=1e-3, warmup_steps=3, weight_decay=0.1, offload_fraction=fraction)
    return scenarios.worker(rank, world, port, folder, layout, optimizer=section, **changes)


def trained(rank: int, world: int, port: int, out: str, *where: Any) -> dict[str, Any]:
    """Run two updates, save, run a refused update and one more."""
    at = worker(rank, world, port, *where)
    sizes = [state_bytes(at)]
    norms = [metrics["grad_norm"] for metrics in scenarios.train(at, 2)]
    at.save_checkpoint(out, {})
    sizes.append(state_bytes(at))
    nothing = at.policy.optimizer.step(finite=False)
    norms += [metrics["grad_norm"] for metrics in scenarios.train(at, 1)]
    assert nothing.skipped and at.policy.optimizer.steps == 3
    return {"digest": scenarios.digest_parameters(at.policy), "norms": norms, "sizes": sizes}


def resumed(rank: int, world: int, port: int, path: str, *where: Any) -> dict[str, Any]:
    """Run the third update from the checkpoint."""
    at = worker(rank, world, port, *where)
    at.load_checkpoint(path)
    scenarios.train(at, 1)
    return {"digest": scenarios.digest_parameters(at.policy), "sizes": [state_bytes(at)]}


def state_bytes(at: MegatronWorker) -> int:
    """Return the device bytes of moments and of master weights that are not the parameters themselves."""
    owned = [
        tensor
        for part in at.policy.optimizer.parts()
        for group in part.optimizer.param_groups
        for master in group["params"]
        for tensor in host_state.own_tensors(part.optimizer, master)
    ]
    return sum(tensor.untyped_storage().size() for tensor in owned)


def test_a_piece_comes_is_updated_and_leaves_before_its_memory_goes(cuda) -> None:
    """On a GPU, copies run on a separate stream: it waits for the update, the host for the copy back."""
    masters = [torch.full((100,), float(number), requires_grad=True) for number in range(3)]
    inner = torch.optim.SGD(masters, lr=1.0, momentum=0.9)
    named = {"model_float16_groups": [masters], "shard_fp32_from_float16_groups": [masters]}
    part = SimpleNamespace(optimizer=inner, model_fp32_groups=[], shard_fp32_groups=[], **named)
    piece = host_state.OptimizerShard(part, masters[:2], DEVICE)
    piece.move_to_host()
    away = ["side waits for current", "on side", "off side", "synchronize side"]
    assert cuda.take() == ["pin", *away]
    assert [m.untyped_storage().size() for m in masters] == [0, 0, 400] and piece.copy_of(masters[2]) is None
    with piece.on_device():
        assert cuda.take() == [*away[:3], "current waits for side"]
        assert [len(group["params"]) for group in inner.param_groups] == [2]
        assert part.shard_fp32_from_float16_groups == [masters[:2]]
        for master in masters:
            master.grad = torch.ones_like(master)
        inner.step()
        assert cuda.take() == []
    assert cuda.take() == ["pin", *away], "the momenta are new"
    assert part.shard_fp32_from_float16_groups == [masters] and masters[2][0] == 2.0
    copies = [piece.copy_of(master) for master in masters[:2]]
    assert [float(copy[0]) for copy in copies if copy is not None] == [-1.0, 0.0]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"ep": 2, "dp": 2}, id="ep2-dp2"),
        pytest.param({"tp": 2}, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_an_update_in_pieces_is_the_whole_one_to_the_last_bit(layout, model, tmp_path) -> None:
    """Keep all or some of the state on the host; each checkpoint resumes under the other setting."""
    folder, dtype = model
    kinds = {"none": 0.0, "some": 0.4, "all": 1.0}
    changes = {"dtype": dtype}
    results = {
        name: run_ranks(trained, 2, str(tmp_path / name), str(folder), layout, fraction, changes)
        for name, fraction in kinds.items()
    }
    for rank in range(2):
        whole, some, all_ = (results[name][rank] for name in kinds)
        assert whole["digest"] == some["digest"] == all_["digest"]
        assert whole["norms"] == some["norms"] == all_["norms"] and min(whole["norms"]) > 0
        assert all_["sizes"] == [0, 0]
        assert 0.4 * whole["sizes"][1] <= some["sizes"][1] <= 0.6 * whole["sizes"][1]
    for source, fraction in (("all", 0.0), ("none", 1.0), ("some", 1.0)):
        again = run_ranks(resumed, 2, str(tmp_path / source), str(folder), layout, fraction, changes)
        assert [r["digest"] for r in again] == [r["digest"] for r in results["none"]], (source, fraction)
        assert [r["sizes"] == [0] for r in again] == [fraction == 1.0] * 2


@pytest.mark.integration
def test_so_it_is_with_transformer_engines_adam(tmp_path: Path) -> None:
    """It counts its steps per group, and rebuilds its states on load."""
    folder = write_model(tmp_path / "model", dtype=torch.bfloat16)
    changes = {"dtype": "bfloat16", "spec": "transformer_engine"}
    whole, host = (
        run_ranks(trained, 1, str(tmp_path / name), str(folder), {}, fraction, changes, stand_ins=FOLDER)[0]
        for name, fraction in (("none", 0.0), ("all", 1.0))
    )
    assert host["digest"] == whole["digest"] and host["sizes"] == [0, 0] < whole["sizes"]
    for source, fraction in (("all", 0.0), ("none", 1.0)):
        path = str(tmp_path / source)
        (again,) = run_ranks(resumed, 1, path, str(folder), {}, fraction, changes, stand_ins=FOLDER)
        assert again["digest"] == whole["digest"], (source, fraction)


@pytest.mark.parametrize("keep_parameters", [False, True])
def test_an_off_loaded_model_leaves_nothing_but_parameters_that_are_kept(keep_parameters, cuda) -> None:
    """Gradients, master weights and moments leave the device, and come back."""
    master, moment, done = torch.ones(6), torch.ones(6), []
    inner = SimpleNamespace(param_groups=[{"params": [master]}], state={master: {"exp_avg": moment}})
    model = TrainedModel.__new__(TrainedModel)
    model.optimizer = optimizer = Optimizer.__new__(Optimizer)
    optimizer._device, optimizer._copies, optimizer._away = DEVICE, HostCopies(DEVICE, keep=True), []
    optimizer.megatron = SimpleNamespace(optimizer=inner)
    calls = ("free_gradients", "offload", "start_copy", "reload")
    model.memory = SimpleNamespace(**{name: lambda name=name: done.append(name) for name in calls})
    model.offload(keep_parameters=keep_parameters)
    assert [t.untyped_storage().size() for t in (master, moment)] == [0, 0]
    model.reload()
    assert done == ["free_gradients" if keep_parameters else "offload", "start_copy", "reload"]
    assert torch.equal(master, torch.ones(6)) and torch.equal(moment, torch.ones(6))
