"""SIGKILL of a rank at each stage of a save during a step: the newest checkpoint is old or new, and whole."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.objective import cross_entropy
from mrl.training.checkpoint import shard_writer
from mrl.training.checkpoint.atomic_save import random_file
from mrl.training.checkpoint.checkpoint_folder import latest_checkpoint, prune
from mrl.training.pass_options import PassOptions
from mrl.training.worker import MegatronWorker
from tests.mrl.training.scenarios import TEMPERATURE, digest_parameters, shard_of, train, worker
from tests.ranks import Rank, free_port, run_ranks
from tests.tiny_models import random_batch, write_model

pytestmark = pytest.mark.integration

LAYOUT = {"ep": 2, "dp": 2}
OLD, NEW = "step-000001", "step-000002"
NOTICED_SECONDS = 120.0
"""The other rank ends within this time; a collective waits longer (collective_seconds of the workers)."""
CASES = (
    (1, "first file", OLD),
    (1, "half its pieces", OLD),
    (1, "last file", OLD),
    (1, "written", OLD),
    (1, "told", OLD),
    (1, "manifest", NEW),
    (0, "half its pieces", OLD),
    (0, "manifest", OLD),
    (0, "rename", OLD),
    (0, "renamed", NEW),
)
"""The killed rank, the stage, and the newest checkpoint after it: before each of its files; with all of them
written; after it reported no error; before rank 0 writes the manifest; around the rename."""
IN_THE_STEP = ("first file", "half its pieces", "last file")
"""Stages of the writing thread: the rank is inside the next step, and the other one waits for it. At others
both ranks begin their files after that step, so that training has changed the weights by then."""


class Step:
    """The training step that runs while a checkpoint is written."""

    def __init__(self, at: MegatronWorker) -> None:
        self._at, self.begun, self.over = at, threading.Event(), threading.Event()

    def run(self, *, ends: bool) -> None:
        """Run the step; if it must not end, this rank stays in its loss."""

        def loss(*arguments: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
            self.begun.set()
            if not ends:
                threading.Event().wait()
            return cross_entropy(*arguments, **options)

        batch = random_batch(10, seed=1)
        count = {"num_tokens": int(batch.loss_mask.sum())}
        self._at.update(shard_of(batch, self._at)[1], loss, count, PassOptions(temperature=TEMPERATURE))
        self.over.set()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def before(event: str, name: str, act: Callable[[], object]) -> None:
    """Call `act` before this process's first `event` on a path that ends in `name`."""
    left = [act]

    def hear(heard: str, arguments: tuple[Any, ...]) -> None:
        if heard == event and str(arguments[0]).endswith(name) and left:
            left.pop()()

    sys.addaudithook(hear)


def after_pieces(count: int, act: Callable[[], object]) -> None:
    """Call `act` once this process has written `count` pieces of its file to disk."""
    write, written = shard_writer._write_piece, []

    def counted(stream: Any, *arguments: Any, **options: Any) -> Any:
        if len(written) == count:
            stream.flush()
            act()
        written.append(write(stream, *arguments, **options))
        return written[-1]

    shard_writer._write_piece = counted


def arm(stage: str, victim: int, rank: int, pids: list[int], step: Step) -> None:
    """Prepare this rank to act at a stage of the next save."""

    def die_in_the_step() -> None:
        assert step.begun.wait(60.0)
        die()

    if stage not in IN_THE_STEP:
        before("open", f"__{rank}_0.distcp", lambda: step.over.wait(60.0))
    if stage == "manifest" and rank == 0:
        before("open", "manifest.json", die if victim == 0 else lambda: kill(pids[victim]))
    if rank != victim:
        return
    if stage == "first file":
        before("open", f"__{rank}_0.distcp", die_in_the_step)
    if stage == "half its pieces":
        after_pieces(20, die_in_the_step)
    if stage == "last file":
        before("open", random_file(rank), die_in_the_step)
    if stage == "rename":
        before("os.rename", ".partial", die)


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    process.wait(60.0)


def save_and_be_killed(
    rank: int, port: int, model: str, out: str, layout: dict[str, int], victim: int, stage: str
) -> None:
    """Train and save twice, the second save during the third step; one rank dies in it or in its commit."""
    at = worker(rank, 2, port, model, layout)
    folder, report = Path(out, "checkpoints"), Path(out, f"told-{rank}")
    digests, pids, step = [], [0, 0], Step(at)
    train(at, 1)
    at.save_checkpoint(folder / OLD, {"step": 1})
    digests.append(digest_parameters(at.policy))
    train(at, 1)
    digests.append(digest_parameters(at.policy))
    report.write_bytes(pickle.dumps(digests))
    dist.all_gather_object(pids, os.getpid())
    arm(stage, victim, rank, pids, step)
    try:
        at.save_checkpoint(folder / NEW, {"step": 2}, beside=True)
        step.run(ends=rank != victim or stage not in IN_THE_STEP)
        end_save(at, stage if rank == victim else "")
        train(at, 1)
    except RuntimeError as error:  # torch.distributed's error if a peer is gone
        report.with_suffix(".error").write_text(repr(error))


def end_save(at: MegatronWorker, stage: str) -> None:
    if stage == "written":
        assert at._save is not None and at._save._thread is not None
        at._save._thread.join()
        assert at.checkpoint_is_written()
        die()
    if stage == "told":
        dist.gather_object = lambda *arguments, **options: die()
    at.commit_checkpoint()
    if stage == "renamed":
        die()


def go_on(rank: int, world: int, port: int, model: str, out: str, layout: dict[str, int]) -> dict[str, Any]:
    """Resume from the newest checkpoint on two new ranks; save the second step again if it is missing."""
    at = worker(rank, world, port, model, layout)
    folder, digests = Path(out, "checkpoints"), {}
    newest = latest_checkpoint(folder)
    assert newest is not None
    step = at.load_checkpoint(newest)["step"]
    digests[step] = digest_parameters(at.policy)
    if step == 1:
        train(at, 1)
        at.save_checkpoint(folder / NEW, {"step": 2})
        digests[2] = digest_parameters(at.policy)
    if rank == 0:
        prune(folder, keep=2)
    dist.barrier()
    assert at.load_checkpoint(folder / NEW) == {"step": 2}
    assert digest_parameters(at.policy) == digests[2]
    return {"newest": newest.name, "digests": digests, "left": sorted(path.name for path in folder.iterdir())}


@pytest.mark.parametrize(
    ("victim", "stage", "newest"), CASES, ids=[f"rank {rank}, {stage}" for rank, stage, _ in CASES]
)
def test_a_rank_killed_in_a_save_leaves_one_whole_checkpoint_or_the_other(
    victim: int, stage: str, newest: str, tmp_path: Path
) -> None:
    model, port = str(write_model(tmp_path / "model", num_hidden_layers=2)), free_port()
    ranks = [
        Rank(
            target=save_and_be_killed,
            args=(rank, port, model, str(tmp_path), LAYOUT, victim, stage),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        wait([ranks[victim].sentinel], timeout=300.0)
        assert ranks[victim].exitcode == -signal.SIGKILL
        ranks[1 - victim].join(NOTICED_SECONDS)
        assert ranks[1 - victim].exitcode == 0, "the other rank neither ended nor had an error of its peer"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    error = (tmp_path / f"told-{1 - victim}.error").read_text()
    assert "Connection" in error or "closed" in error, error
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        OLD,
        NEW + ".partial" * (newest == OLD),
    ]
    after = run_ranks(go_on, 2, model, str(tmp_path), LAYOUT)
    for rank, result in enumerate(after):
        one, two = pickle.loads((tmp_path / f"told-{rank}").read_bytes())
        expected = {1: one, 2: two} if newest == OLD else {2: two}
        assert result == {"newest": newest, "digests": expected, "left": [OLD, NEW]}
