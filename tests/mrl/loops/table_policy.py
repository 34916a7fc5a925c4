"""A policy small enough to stand behind the loop's protocols in one process: a table of logits, one row for each last token.

It samples, computes log-probs and takes gradient steps for real; only the engines' processes are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from mrl.loops import group_pool
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.collect import Collector
from mrl.loops.episodes import Episodes
from mrl.loops.group_supply import GroupSupply
from mrl.loops.in_flight import InFlight
from mrl.loops.on_policy import OnPolicyLoop
from mrl.loops.produce import Producer
from mrl.loops.recorder import Recorder
from mrl.loops.stop_rules import StopRules
from mrl.loops.stream import StreamLoop
from mrl.observe import metrics_log
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.rollout.request import GenerationRequest, Response, Round, sample_of, seed_of_request
from mrl.routes import RouteRows, Routes
from mrl.samples import (
    Group,
    Prompt,
    Sample,
    Status,
    TrainBatch,
    Verdict,
    VerdictKind,
)
from mrl.training.pass_options import PassOptions
from tests.support.samples import make_response
from tests.support.table_environment import Returns, digits

VOCAB, LONGEST = 6, 4
CONFIGS = Path(__file__).parents[3] / "configs"
ROWS = [Prompt(n, np.array([n], np.int32), "", None) for n in range(VOCAB)]


def config_of(folder: Path, algorithm: Mapping[str, Any], *words: str) -> Config:
    """Four groups of four a step; checkpoints and validation, of four prompts, off."""
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
    """The trainer."""

    def __init__(self, config: Config) -> None:
        self._lr, self._objective = config.training.optimizer.lr, Objective(config.algorithm)
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).requires_grad_()
        self.reference = self.table.detach().clone()
        self.batches: list[TrainBatch] = []
        """What was trained on, minibatch by minibatch."""
        self.saved: dict[Path, tuple[dict[str, Any], Tensor]] = {}
        """The loop's state and the table of each checkpoint."""
        self.dies: Exception | None = None
        """What the next update raises."""
        self.save_fails: Exception | None = None
        self.writes_slowly = False
        """Whether the files of a save beside training are never there before they are waited for."""
        self._saving: Any = None
        self.called: list[str] = []
        """The passes over the model, in order."""
        self._pump: Callable[[], Any] | None = None

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray]:
        role = options.role
        self.called.append(f"forward {role}" + " with routes" * (batch.routes is not None))
        if role == "critic":
            return {"values": np.zeros(batch.num_tokens, np.float32)}
        with torch.no_grad():
            logprobs, entropy = _both(self.table if role == "policy" else self.reference, batch)
        found = {"logprobs": logprobs.numpy(), "entropy": entropy.numpy()}
        return found | self._said(batch, options.with_reference)

    def _said(self, batch: TrainBatch, wanted: bool) -> dict[str, np.ndarray]:
        if not wanted:
            return {}
        self.called.append("reference beside")
        return {"ref_logprobs": _both(self.reference, batch)[0].numpy()}

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], TrainBatch]:
        """The routes of sample b are one row, b."""
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
        batch = batch.with_arrays(**(said := self._said(batch, options.with_reference)))
        if self._pump is not None:
            for _ in range(3):
                self._pump()
        self.batches.append(batch)
        logprobs, entropy = _both(self.table, batch)
        found = {"logprobs": logprobs.detach().numpy()} | said
        # As the real worker: an objective refuses such values.
        if not all(np.isfinite(values).all() for values in found.values()):
            self._gradient = torch.full_like(self.table, float("nan"))
            return found, {"loss": float("nan")}
        arrays = {name: torch.from_numpy(values) for name, values in batch.arrays.items()}
        loss, metrics = self._objective(
            logprobs=logprobs,
            entropy=entropy,
            arrays=arrays | {"loss_mask": torch.from_numpy(batch.loss_mask)},
            segments=Segments.of(batch.lengths()),
            denominators=denominators,
        )
        (self._gradient,) = torch.autograd.grad(loss, self.table)
        return found, {n: float(v) for n, v in metrics.items()} | {"loss": float(loss.detach())}

    def step(self) -> dict[str, float]:
        norm = float(self._gradient.norm())
        with torch.no_grad():
            self.table -= self._lr * self._gradient
        return {"grad_norm": norm, "skipped": float(not math.isfinite(norm))}

    @contextlib.contextmanager
    def meanwhile(self, pump: Callable[[], Any]) -> Iterator[None]:
        self._pump = pump
        yield
        self._pump = None

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
    """A request that the engines hold."""

    request: GenerationRequest
    rng: np.random.Generator
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


class TableEngines:
    """The trainer's table, and the copy that responses are sampled from until the next sync."""

    def __init__(self, config: Config) -> None:
        self.train = TableRanks(config)
        self.version, self._table = -1, self.train.table
        self.open: dict[str, _Open] = {}
        self._waiting: dict[str, _Open] = {}
        """Since a park."""
        self.tokens_per_poll = LONGEST
        """Of every request that is at work; below LONGEST responses finish at different polls."""
        self.at_once = 1 << 30
        """Requests at work; the others wait."""
        self.speaks: Callable[[Sequence[int]], str] = lambda tokens: ""
        """The text of a response's tokens."""
        self.damage = torch.zeros(VOCAB, VOCAB)
        """Added to what a sync moves."""
        self.dies: Exception | None = None
        """What the next sync raises."""
        self.rests = False
        self.synced: list[int] = []
        """Versions, in order."""

    def sync(self, version: int) -> dict[str, float]:
        assert not self.open, "a response would mix versions"
        if self.dies is not None:
            raise self.dies
        self.version, self._table = version, self.train.table.detach().clone() + self.damage
        self.rests = False
        self.synced.append(version)
        return {}

    def rest(self) -> None:
        assert not self.open and not self.rests, "the trainer takes its memory back once"
        self.rests = True

    def submit(self, requested: Iterable[Round | GenerationRequest]) -> None:
        assert not self.rests, "the engines gave their memory away"
        for each in requested:
            for request in each.requests() if isinstance(each, Round) else [each]:
                self.open[request.request_id] = _Open(request, np.random.default_rng(request.seed))
        self.open = dict(sorted(self.open.items(), key=lambda item: sample_of(item[0])))

    def at_work(self) -> Sequence[int]:
        return [0] if self.open else []

    def ended(self, timeout_seconds: float) -> Sequence[int]:
        return [0]

    def take(self, engines: Sequence[int]) -> list[Response]:
        if not engines:
            return []
        for _ in range(self.tokens_per_poll):
            for opened in [o for o in self.open.values() if not self._has_ended(o)][: self.at_once]:
                self._step(opened)
        ended = [name for name, opened in self.open.items() if self._has_ended(opened)]
        return [self._response(self.open.pop(name), Status.FINISHED) for name in ended]

    def be_patient(self, seconds: float, awaited: int = -1) -> None: ...

    def park(self) -> list[Response]:
        """Those that have a token now leave; the others wait."""
        begun = [opened for opened in self.open.values() if opened.tokens]
        self._waiting |= {name: opened for name, opened in self.open.items() if not opened.tokens}
        self.open.clear()
        return [self._response(opened, Status.PARKED) for opened in begun]

    def go_on(self) -> None:
        self.open |= self._waiting
        self._waiting.clear()

    def under_way(self) -> Sequence[Any]:
        return ()

    def where(self, prompt: int) -> str:
        return "the table"

    def _has_ended(self, opened: _Open) -> bool:
        request = opened.request
        return len(request.own_tokens) + len(opened.tokens) >= _length_of(request.request_id)

    def _step(self, opened: _Open) -> None:
        last = opened.tokens[-1] if opened.tokens else int(opened.request.engine_prompt()[-1])
        row = self._table[last].log_softmax(-1).double()
        probabilities = row.exp().numpy()
        token = int(opened.rng.choice(VOCAB, p=probabilities / probabilities.sum()))
        opened.tokens.append(token)
        opened.logprobs.append(float(row[token]))

    def _response(self, opened: _Open, status: Status) -> Response:
        text = "" if status is Status.PARKED else self.speaks([*opened.request.own_tokens, *opened.tokens])
        return make_response(
            opened.request,
            opened.tokens,
            logprobs=opened.logprobs,
            version=self.version,
            status=status,
            text=text,
        )


@functools.cache
def _length_of(request_id: str) -> int:
    """Tokens of a response as a whole, whoever asks for it and how often."""
    return int(np.random.default_rng(seed_of_request(9, request_id)).integers(1, LONGEST + 1))


class EvenIsRight:
    """Reward 1 for a response whose first token is even."""

    def __init__(self) -> None:
        self._verdicts: list[tuple[str, Verdict]] = []

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        self._verdicts += [
            (s.sample_id, Verdict(VerdictKind.SCORED, float(s.response_tokens[0] % 2 == 0))) for s, _ in pairs
        ]

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def flush_groups(self, prompts: Collection[int]) -> None:
        pass


class TableRun:
    """A loop over the table."""

    def __init__(
        self,
        config: Config,
        *,
        first_step: int = 0,
        should_stop: Callable[[], str | None] = lambda: None,
        episodes: Callable[[], Episodes] | None = None,
    ) -> None:
        """`episodes`: makes what answers the policy's turns, whose rewards are then the run's."""
        self.engines, clock, self._config = TableEngines(config), PhaseClock(), config
        self.rewards, self._episodes = EvenIsRight() if episodes is None else Returns(), episodes
        self.train = self.engines.train
        self.groups: list[Sequence[Group]] = []
        """Of each step."""
        self._folder = RunFolder(config.run_folder)
        if episodes is not None:
            self.engines.speaks = digits
        in_flight = InFlight(
            self.engines,
            self.rewards,
            clock,
            run_seed=0,
            episodes=None if episodes is None else episodes(),
        )
        collector = Collector(in_flight, clock=clock, deadline_seconds=60)
        self.prompts = prompts = PromptStream(ROWS, seed=1)
        recorder = Recorder(
            config, self._folder, clock, first_step=first_step, pieces=lambda tokens: [str(t) for t in tokens]
        )
        self.said: list[str] = []
        """By stop rules."""
        rules = StopRules(config, self._folder.metrics, self.said.append)
        held_out = [dataclasses.replace(prompts.prompt_at(n), index=n - 4) for n in range(4)]
        common = held_out, recorder, Checkpoints(config, self._folder)
        more: dict[str, Any] = {"should_stop": should_stop, "stop_rules": rules}
        self.loop: OnPolicyLoop | StreamLoop
        if config.loop.schedule == "stream":
            self.store = group_pool.open_group_store(config, prompts)
            self.producer = Producer(config, prompts, in_flight, self.store)
            self.loop = StreamLoop(config, self.engines, collector, self.producer, *common, **more)
        else:
            supply = GroupSupply(config, prompts)
            self.loop = OnPolicyLoop(config, self.engines, collector, supply, *common, **more)
        self.loop.on_batch = self.groups.append

    def finished(self) -> str:
        """Why the run ended, all steps on end."""
        self.loop.start()
        return self.loop.run()

    def resumed(self, config: Config | None = None) -> TableRun:
        """A new start of the same run, from its last checkpoint; state travels as bytes. `config`: another one from here on."""
        state, table = self.train.saved[max(self.train.saved)]
        self._folder.close()
        run = TableRun(
            config or self._config,
            first_step=int(state["next_step"]),
            episodes=self._episodes,
        )
        run.engines.tokens_per_poll, run.engines.at_once = self.engines.tokens_per_poll, self.engines.at_once
        with torch.no_grad():
            run.train.table.copy_(table)
        run.loop.restore(pickle.loads(pickle.dumps(state)))
        return run

    def close(self) -> None:
        """Gives the run's folder to another start."""
        self._folder.close()

    def bounded_samples(self) -> list[Sample]:
        """What a stream trained on, with no token older than its settings allow and no seed used for two segments."""
        stream, samples = self._config.stream, []
        bound = stream.max_age + stream.sync_every - 1
        for version, groups in enumerate(self.groups):
            for sample in (sample for group in groups for sample in group.samples):
                ages = version - np.asarray(sample.policy_versions)
                assert ages.min() >= 0 and ages.max() <= bound
                attempts = [segment.attempt for segment in sample.segments]
                assert attempts == sorted(set(attempts)), "a seed was used for two segments"
                samples.append(sample)
        return samples

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far."""
        return metrics_log.read(self._folder.metrics)


def logprobs_of(table: Tensor, batch: TrainBatch) -> Tensor:
    """[N] of each token after the one before it; 0 for a segment's first."""
    return _both(table, batch)[0]


def _both(table: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) [N]."""
    tokens = torch.from_numpy(batch.tokens)
    rows = table.log_softmax(-1)[tokens.roll(1)]
    inside = torch.ones(batch.num_tokens, dtype=torch.bool)
    inside[batch.cu_seqlens[:-1].astype(np.int64)] = False
    logprobs = rows.gather(1, tokens[:, None])[:, 0]
    entropy = -(rows.exp() * rows).sum(-1)
    return logprobs * inside, entropy * inside
