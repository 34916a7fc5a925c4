"""A table of logits as the policy: real samples, log-probs and gradient steps, but no engine processes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from mrl.algorithms.objective import Objective
from mrl.algorithms.tokens import Segments
from mrl.config.load import load
from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.group_supply import GroupSupply
from mrl.loops.on_policy import OnPolicyLoop
from mrl.loops.recorder import Recorder
from mrl.loops.rollout_thread import RolloutThread, in_this_process
from mrl.loops.stream import StreamLoop
from mrl.observe import metrics_log
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.rollout.engine_pool import Engines, PauseTotals
from mrl.rollout.request import Completion, GenerationRequest, Sampling, join_completions, next_request
from mrl.rollout.seeds import sample_of, seed_of_request
from mrl.routes import RouteRows, Routes
from mrl.samples import Group, Prompt, Sample, Status, TrainBatch, Verdict, VerdictKind
from mrl.training.pass_options import PassOptions
from mrl.trajectories.rewards import RewardWorkers
from tests.support.samples import make_completion
from tests.support.table_environment import Returns, digits

VOCAB, LONGEST = 6, 4
CONFIGS = Path(__file__).parents[3] / "configs"
ROWS = [Prompt(n, np.array([n], np.int32), "", None) for n in range(VOCAB)]


def config_of(folder: Path, algorithm: Mapping[str, Any], *words: str) -> Config:
    """Four groups of four per step; no checkpoints, no validation (of four prompts)."""
    overlay = folder / "overlay.yaml"
    section = {
        "algorithm": dict(algorithm),
        "run": {"name": "run", "folder": str(folder)},
        "training": {"optimizer": {"lr": 0.5}},
        "loop": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "validation": {"every_steps": 0, "before_training": False, "after_training": False},
            "checkpoint": {"every_steps": 0, "at_end": False},
        },
    }
    overlay.write_text(yaml.safe_dump(section))
    return load([CONFIGS / "quickstart.yaml", overlay], words)


class TableRanks:
    def __init__(self, config: Config) -> None:
        self._lr, self._objective = config.training.optimizer.lr, Objective(config.algorithm)
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).requires_grad_()
        self.reference = self.table.detach().clone()
        self.batches: list[TrainBatch] = []
        self.saved: dict[Path, tuple[dict[str, Any], Tensor]] = {}
        """Loop state and table of each checkpoint."""
        self.dies: Exception | None = None
        """Raised by the next update."""
        self.save_fails: Exception | None = None
        self.writes_slowly = False
        """True: an asynchronous save completes only when it is waited for."""
        self._saving: Any = None
        self.called: list[str] = []
        """The passes over the model, in order."""
        self.update_seconds = 0.0

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray]:
        role = options.role
        self.called.append(f"forward {role}" + " with routes" * (batch.routes is not None))
        if role == "critic":
            return {"values": np.zeros(batch.num_tokens, np.float32)}
        with torch.no_grad():
            logprobs, entropy = _both(self.table if role == "policy" else self.reference, batch)
        outputs = {"logprobs": logprobs.numpy(), "entropy": entropy.numpy()}
        return outputs | self._said(batch, options.with_reference)

    def _said(self, batch: TrainBatch, wanted: bool) -> dict[str, np.ndarray]:
        if not wanted:
            return {}
        self.called.append("reference beside")
        return {"ref_logprobs": _both(self.reference, batch)[0].numpy()}

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], TrainBatch]:
        """Record one row of routes per sample: sample b has row b."""
        block = np.arange(batch.num_samples)[:, None, None]
        routes = tuple(Routes((RouteRows(block, b, b + 1),)) for b in range(batch.num_samples))
        return self.forward(batch, options), dataclasses.replace(batch, routes=routes)

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> dict[str, float]:
        if options.role == "critic":
            return {"skipped": 0.0}
        _, metrics = self.accumulate(batch, denominators, options)
        return metrics | self.step()

    def accumulate(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        if self.dies is not None:
            raise self.dies
        self.called.append("update")
        batch = batch.with_arrays(**(extra := self._said(batch, options.with_reference)))
        time.sleep(self.update_seconds)
        self.batches.append(batch)
        logprobs, entropy = _both(self.table, batch)
        outputs = {"logprobs": logprobs.detach().numpy()} | extra
        # Like the real worker: an objective rejects non-finite values.
        if not all(np.isfinite(values).all() for values in outputs.values()):
            self._gradient = torch.full_like(self.table, float("nan"))
            return outputs, {"loss": float("nan")}
        arrays = {name: torch.from_numpy(values) for name, values in batch.arrays.items()}
        loss, metrics = self._objective(
            logprobs=logprobs,
            entropy=entropy,
            arrays=arrays | {"loss_mask": torch.from_numpy(batch.loss_mask)},
            segments=Segments.of(batch.lengths()),
            denominators=denominators,
        )
        (self._gradient,) = torch.autograd.grad(loss, self.table)
        return outputs, {n: float(v) for n, v in metrics.items()} | {"loss": float(loss.detach())}

    def step(self) -> dict[str, float]:
        norm = float(self._gradient.norm())
        with torch.no_grad():
            self.table -= self._lr * self._gradient
        return {"grad_norm": norm, "skipped": float(not math.isfinite(norm))}

    def save_checkpoint(self, path: Path, state: Mapping[str, Any], *, beside: bool) -> None:
        self._saving = path, (dict(state), self.table.detach().clone())
        if not beside:
            self.commit_checkpoint()

    def checkpoint_is_written(self) -> bool:
        return not self.writes_slowly

    def commit_checkpoint(self) -> None:
        if self.save_fails is not None:
            raise self.save_fails
        path, self.saved[path] = self._saving
        path.mkdir(parents=True)


@dataclasses.dataclass
class _Open:
    original: GenerationRequest
    so_far: Completion | None
    """The partial response before the last pause."""
    done: asyncio.Future[Completion]
    request: GenerationRequest = dataclasses.field(init=False)
    rng: np.random.Generator = dataclasses.field(init=False)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def begin(self) -> None:
        self.request = self.original if self.so_far is None else next_request(self.original, self.so_far, 0)
        self.rng = np.random.default_rng(self.request.seed)
        self.tokens, self.logprobs = [], []


class TableEngines(Engines):
    """The trainer's table, and the copy that is sampled from until the next sync."""

    def __init__(self, config: Config) -> None:
        self.train = TableRanks(config)
        self.version, self._table = -1, self.train.table
        self.newest_version = -1
        self.open: dict[str, _Open] = {}
        self.step_seconds = 0.0
        self.tokens_per_step = LONGEST
        """Per running request; below LONGEST, responses finish at different steps."""
        self.at_once = 1 << 30
        """Running requests; the others wait."""
        self.stops_after: int | None = None
        """Number of steps after which the engine stops by itself."""
        self.speaks: Callable[[Sequence[int]], str] = lambda tokens: ""
        """Returns the text of a response's tokens."""
        self.damage = torch.zeros(VOCAB, VOCAB)
        self.dies: Exception | None = None
        """Raised by the next sync."""
        self.rests, self.paused, self._trains = False, True, True
        self.synced: list[int] = []
        """Versions, in order."""
        self.num_steps = 0
        self._stepping: asyncio.Task[None] | None = None

    def transfer(self, version: int) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> dict[str, float]:
        assert self.paused, "a response would mix versions"
        if self.dies is not None:
            raise self.dies
        self.version, self._table = version, self.train.table.detach().clone() + self.damage
        self.rests = False
        self.synced.append(version)
        return {}

    def end_generation(self) -> None:
        assert self.paused and not self.rests, "the trainer takes its memory back once"
        self.rests = True

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        seq = _Open(request, so_far, asyncio.get_running_loop().create_future())
        seq.begin()
        items = [*self.open.items(), (request.request_id, seq)]
        self.open = dict(sorted(items, key=lambda item: sample_of(item[0])))
        self._work()
        try:
            return await seq.done
        finally:
            self.open.pop(request.request_id, None)

    async def pause(self, *, snapshot: bool) -> PauseTotals:
        self.paused, begun = True, [seq for seq in self.open.values() if seq.tokens]
        for seq in begun:
            seq.so_far = join_completions(seq.so_far, self._completion(seq, Status.INTERRUPTED))
            seq.begin()
        return PauseTotals(len(begun), sum(len(seq.request.engine_prompt()) for seq in begun))

    def resume(self, *, training: bool = True) -> None:
        assert not self.rests, "the engines gave their memory away"
        self.paused, self._trains = False, training
        self._work()

    def so_far(self, request_id: str) -> Completion | None:
        seq = self.open.get(request_id)
        return None if seq is None else seq.so_far

    def where(self, request_id: str) -> str:
        return "on the table"

    @property
    def is_stranded(self) -> bool:
        return False

    def _work(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(self._steps())

    async def _steps(self) -> None:
        while not self.paused and self.num_steps != self.stops_after and self._ready():
            await asyncio.sleep(self.step_seconds)
            if not self.paused:
                self._step()
                self.num_steps += 1

    def _ready(self) -> list[_Open]:
        ready = (seq for seq in self.open.values() if not seq.done.done())
        return [seq for seq in ready if self._trains or sample_of(seq.original.request_id)[0] < 0]

    def _step(self) -> None:
        for seq in self._ready()[: self.at_once]:
            for _ in range(self.tokens_per_step):
                if not self._has_ended(seq):
                    self._draw(seq)
            if self._has_ended(seq):
                self.newest_version = max(self.newest_version, self.version)
                seq.done.set_result(join_completions(seq.so_far, self._completion(seq, Status.FINISHED)))

    def _has_ended(self, seq: _Open) -> bool:
        return len(seq.request.own_tokens) + len(seq.tokens) >= _length_of(seq.original.request_id)

    def _draw(self, seq: _Open) -> None:
        last = seq.tokens[-1] if seq.tokens else int(seq.request.engine_prompt()[-1])
        row = self._table[last].log_softmax(-1).double()
        probabilities = row.exp().numpy()
        token = int(seq.rng.choice(VOCAB, p=probabilities / probabilities.sum()))
        seq.tokens.append(token)
        seq.logprobs.append(float(row[token]))

    def _completion(self, seq: _Open, status: Status) -> Completion:
        text = "" if status is Status.INTERRUPTED else self.speaks([*seq.request.own_tokens, *seq.tokens])
        return make_completion(
            seq.request, seq.tokens, logprobs=seq.logprobs, version=self.version, status=status, text=text
        )


@functools.cache
def _length_of(request_id: str) -> int:
    """Return a whole response's length in tokens, the same for each attempt."""
    return int(np.random.default_rng(seed_of_request(9, request_id)).integers(1, LONGEST + 1))


class EvenIsRight:
    """Reward 1 for a response whose first token is even."""

    keeps_back: Callable[[str], bool] = staticmethod(lambda sample_id: False)
    """Returns True for samples whose verdict never comes."""

    def deliver_to(self, deliver: Callable[[str, Verdict], None]) -> None:
        self._deliver = deliver

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        for sample, _ in pairs:
            if not self.keeps_back(sample.sample_id):
                value = float(sample.response_tokens[0] % 2 == 0)
                self._deliver(sample.sample_id, Verdict(VerdictKind.SCORED, value))

    def flush_groups(self, prompts: Collection[int]) -> None:
        pass

    def check(self) -> None:
        pass


THREADS: list[RolloutThread] = []
"""Threads of the running test; conftest.py closes them."""


def thread_over(
    engines: Engines,
    rewards: RewardWorkers,
    clock: PhaseClock,
    *,
    deadline_seconds: float = 60.0,
    **acts: Any,
) -> RolloutThread:
    """Build rollouts over engines and reward workers of this process; `acts` answers turns."""
    make = in_this_process(lambda _: engines, rewards, run_seed=0, **acts)
    thread = RolloutThread(make, clock, deadline_seconds=deadline_seconds)
    THREADS.append(thread)
    return thread


class TableRun:
    def __init__(
        self,
        config: Config,
        *,
        first_step: int = 0,
        should_stop: Callable[[], str | None] = lambda: None,
        acts: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`acts` builds what answers the turns (e.g. table_episodes); its rewards are then the run's."""
        self.engines, clock, self._config = TableEngines(config), PhaseClock(), config
        self.rewards, self._acts = EvenIsRight() if acts is None else Returns(), acts
        self.train = self.engines.train
        self.groups: list[Sequence[Group]] = []
        """One entry per step."""
        self._first_version = max(0, first_step - 1)
        self._folder = RunFolder(config.run_folder)
        if acts is not None:
            self.engines.speaks = digits
        deadline = config.loop.phase_deadline_seconds
        self.rollouts = thread_over(
            self.engines, self.rewards, clock, deadline_seconds=deadline, **({} if acts is None else acts())
        )
        self.prompts = prompts = PromptStream(ROWS, seed=1)
        recorder = Recorder(
            config, self._folder, clock, first_step=first_step, pieces=lambda tokens: [str(t) for t in tokens]
        )
        held_out = [dataclasses.replace(prompts.prompt_at(n), index=n - 4) for n in range(4)]
        common = held_out, recorder, Checkpoints(config, self._folder)
        options: dict[str, Any] = {"should_stop": should_stop}
        self.loop: OnPolicyLoop | StreamLoop
        sampling = Sampling.of(config)
        if config.loop.schedule == "stream":
            self.rollouts.open_buffer(config, prompts, sampling)
            self.loop = StreamLoop(config, self.engines, self.rollouts, *common, **options)
        else:
            supply = GroupSupply(config, prompts, sampling)
            self.loop = OnPolicyLoop(config, self.engines, self.rollouts, supply, *common, **options)
        self.loop.on_batch = self.groups.append

    def finished(self) -> str:
        """Run all steps and return why the run ended."""
        self.loop.start()
        return self.loop.run()

    def resumed(self, config: Config | None = None) -> TableRun:
        """Return a new start of the run from its last checkpoint (state as bytes), with `config` if given."""
        state, table = self.train.saved[max(self.train.saved)]
        self.close()
        run = TableRun(config or self._config, first_step=int(state["next_step"]), acts=self._acts)
        run.engines.tokens_per_step, run.engines.at_once = self.engines.tokens_per_step, self.engines.at_once
        run.engines.step_seconds = self.engines.step_seconds
        with torch.no_grad():
            run.train.table.copy_(table)
        run.loop.restore(pickle.loads(pickle.dumps(state)))
        return run

    def close(self) -> None:
        """Release the run's folder for another start."""
        self.rollouts.close()
        self._folder.close()

    def bounded_samples(self) -> list[Sample]:
        """Return a stream's trained samples; check that no token is too stale and no seed was used twice."""
        stream, samples = self._config.stream, []
        bound = stream.max_staleness + stream.sync_every - 1
        for version, groups in enumerate(self.groups, self._first_version):
            for sample in (sample for group in groups for sample in group.samples):
                ages = version - np.asarray(sample.policy_versions)
                assert ages.min() >= 0 and ages.max() <= bound
                attempts = [segment.attempt for segment in sample.segments]
                assert attempts == sorted(set(attempts)), "a seed was used for two segments"
                samples.append(sample)
        return samples

    def rows(self) -> list[dict[str, Any]]:
        return metrics_log.read(self._folder.metrics)


def logprobs_of(table: Tensor, batch: TrainBatch) -> Tensor:
    """Return log-probs [N] of each token given the one before it; 0 for a segment's first."""
    return _both(table, batch)[0]


def _both(table: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(batch.tokens)
    rows = table.log_softmax(-1)[tokens.roll(1)]
    inside = torch.ones(batch.num_tokens, dtype=torch.bool)
    inside[batch.cu_seqlens[:-1].astype(np.int64)] = False
    logprobs = rows.gather(1, tokens[:, None])[:, 0]
    entropy = -(rows.exp() * rows).sum(-1)
    return logprobs * inside, entropy * inside
