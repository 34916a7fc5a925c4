"""One vLLM engine by single requests: submit, step, pause, resume. A plain class, for one thread.

Token in, token out. We step the engine ourselves, in this process; with tensor parallelism vLLM starts its own workers,
which die with this process. Weights come by weight sync only (`receive`): an engine that has no committed version serves
nothing.

A request outlives weight updates. `pause` takes the running requests out of vLLM at a token boundary and keeps them with
their tokens; `resume` continues them, with new weights, as further segments of the same completion. Prompts, groups and
retries are the caller's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.sync import SyncSection
from mrl.errors import RolloutError, WeightSyncError
from mrl.resharding.transfer.session import Session
from mrl.rollout import engine_routes, exchange, lockstep, scratch, vllm_start
from mrl.rollout.engine_workers import EngineWorkers
from mrl.rollout.part import Part
from mrl.rollout.request import Completion, GenerationRequest, join_completions, next_request
from mrl.rollout.waiting import ALL, NOTHING, TRAINING, WaitingQueue
from mrl.rollout.worker_watch import watch_workers
from mrl.samples import Status

WHOLE = Part()
"""An engine of one process."""
_MEMORY = ("weights", "kv_cache")
"""vLLM's tags of what sleeps and wakes."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    asked: GenerationRequest
    """As the caller made it."""
    request: GenerationRequest
    """As it runs, or will run next: after a pause its own tokens are those that came before."""
    so_far: Completion | None = None
    """What came of it before the last pause."""
    name: str = ""
    """vLLM's name of it; empty while vLLM does not have it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Paused:
    """What a pause interrupted."""

    num_requests: int = 0
    """Requests taken out of vLLM with their tokens."""
    num_tokens: int = 0
    """Tokens of their contexts, which vLLM computes again after it."""


class RolloutEngine(EngineWorkers):
    """An engine of a run, or one dp rank of it; its worker i lies on the i-th of its slots."""

    def __init__(
        self,
        rollout: RolloutSection,
        model_path: str,
        *,
        max_length: int,
        seed: int,
        part: Part = WHOLE,
        meeting: vllm_start.Meeting | None = None,
        sync: SyncSection | None = None,
        stop_token_ids: Sequence[int] = (),
        deterministic: bool = False,
        real_weights: bool = False,
        trust_remote_code: bool = False,
        routes: bool = False,
        keeps_caches: bool = False,
        on_worker_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Start vLLM.

        Args:
            part, meeting: Which process of an engine of several this is, and where they find each other.
            seed: Seed of the run, from which requests that continue get theirs.
            stop_token_ids: The folder's end-of-text tokens (`stop_tokens.end_of_text`).
            deterministic: No prefix cache, and requests are taken only while the engine is empty.
            real_weights: Load the folder's weights as version 0 (tools, measurements).
            trust_remote_code: The folder's tokenizer, which `rollout.stop` needs, may be the folder's own code.
            routes: Record the experts that tokens visit.
            keeps_caches: A pause leaves requests in vLLM, over the KV cache of earlier weights (stream.kv_cache: keep).
            on_worker_lost: Called with its name, in a thread of its own, when a worker process of vLLM ended by itself.
        """
        started = time.monotonic()
        super().__init__(part, sync or SyncSection())
        self._rollout, self._seed = rollout, seed
        self._deterministic, self._keeps_caches = deterministic, keeps_caches
        self._stop = tuple(dict.fromkeys((*stop_token_ids, *rollout.stop_token_ids)))
        self._max_length = max_length
        self._scratch = scratch.Scratch()
        with self._scratch.in_use():
            self._engine = vllm_start.start_engine(
                rollout,
                model_path,
                max_length=max_length,
                seed=seed,
                part=part,
                meeting=meeting,
                deterministic=deterministic,
                real_weights=real_weights,
                trust_remote_code=trust_remote_code,
                routes=routes,
            )
        self._scratch.note_segments()
        self._routes = engine_routes.route_source(model_path, self._ask_workers) if routes else None
        watch_workers(self._engine.model_executor, on_worker_lost)
        self.policy_version = -1
        """The last version of the weights that all workers committed; -1 before the first."""
        self._not_serving = "it never received weights"
        """Why the engine may not serve; empty while it may. The workers know the state of their own weights."""
        self._open: dict[str, _Open] = {}
        self._waiting = WaitingQueue()
        self._running: dict[str, _Open] = {}
        """What vLLM has, by request id; at most rollout.max_num_seqs."""
        self._ended: list[Completion] = []
        """What ended outside of a step, for the next one."""
        self._round_started = False
        self._awake = set(_MEMORY)
        if real_weights:
            self._become_visible(0)
        self.start_seconds = time.monotonic() - started

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return True if a step has something to do; requests that are held do not count."""
        return bool(self._running or len(self._waiting) or self._ended)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Take requests, which begin in the order of prompts when vLLM has room.

        Raises:
            RolloutError: A request cannot be run, or the engine is deterministic and has begun.
        """
        requests = list(requests)
        if self._deterministic and self._round_started:
            raise RolloutError(
                f"{self.part.name} is deterministic: a round's requests are all submitted before its first step; "
                f"{len(self._open)} of the running round are unfinished"
            )
        for request in requests:
            self._check(request)
            self._open[request.request_id] = _Open(request, request)
        self._waiting.add(requests)

    def step(self) -> list[Completion]:
        """Run one step of vLLM, if there is work; return what ended. All dp ranks of an engine step together
        (`vote`)."""
        ended = self.take_ended()
        with lockstep.in_lockstep(self.part.name, alone=self.part.is_whole):
            if self._running or len(self._waiting):
                self._require_serving()
                self._begin()
            if self._running or self._engine.should_execute_dummy_batch:
                self._round_started = True
                ended += self._step()
        return ended

    def take_ended(self) -> list[Completion]:
        """Return what ended outside of a step, once."""
        ended, self._ended = self._ended, []
        return ended

    def vote(self, *, wants_pause: bool) -> tuple[bool, bool]:
        """Return (whether any dp rank has work, whether all want to pause), once all ranks of the engine have asked."""
        if self.part.dp == 1:
            return self.has_work, wants_pause
        with lockstep.in_lockstep(self.part.name, alone=False):
            works, goes_on = lockstep.most((int(self.has_work), int(not wants_pause)), self._engine.dp_group)
        # A rank without requests takes part in the forward pass of the others with an empty batch.
        idle = not (self._running or len(self._waiting))
        self._engine.should_execute_dummy_batch = bool(works) and idle and bool(goes_on)
        return bool(works), not goes_on

    def pause(self) -> Paused:
        """Stop at a token boundary: running requests leave vLLM with their tokens and wait, as everything else does, for
        `resume`. With `keeps_caches` they stay in vLLM. What ended on the way comes from the next step."""
        self._waiting.hold(ALL)
        self._engine.should_execute_dummy_batch = False
        self._ended += self._settle()
        interrupted, self._round_started = list(self._running.values()), False
        if self._keeps_caches:
            return Paused(len(interrupted))
        outputs = [exchange.unfinished(self._state(own.name)) for own in interrupted]
        parts = self._completions(outputs)
        self._engine.abort_request([own.name for own in interrupted], internal=True)
        self._running.clear()
        for own, part in zip(interrupted, parts, strict=True):
            own.so_far, own.name = join_completions(own.so_far, part), ""
            own.request = next_request(own.asked, own.so_far, self._seed)
        self._waiting.add(own.request for own in interrupted)
        contexts = (len(own.request.prompt_tokens) + len(own.request.own_tokens) for own in interrupted)
        return Paused(len(interrupted), sum(contexts))

    def snapshot(self) -> list[Completion]:
        """Return what has come so far of each open request that has a token, as PARKED; while paused."""
        begun = {name: own.so_far for name, own in self._open.items() if own.so_far is not None}
        if self._running:
            outputs = [exchange.unfinished(self._state(own.name)) for own in self._running.values()]
            for part in self._completions(outputs):
                begun[part.request_id] = join_completions(begun.get(part.request_id), part)
        return [
            dataclasses.replace(part, status=Status.PARKED) for part in begun.values() if len(part.tokens)
        ]

    def resume(self, *, training: bool = True) -> None:
        """Let requests run again; with `training` False only those of a validation."""
        self._waiting.hold(NOTHING if training else TRAINING)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop requests and forget them; unknown ids are ignored."""
        request_ids = [request_id for request_id in request_ids if self._open.pop(request_id, None)]
        running = [self._running.pop(i).name for i in request_ids if i in self._running]
        self._engine.abort_request(running, internal=True)
        self._waiting.remove(request_ids)
        self._round_started &= bool(self._open)

    def generate(self, requests: Sequence[GenerationRequest], *, deadline: float) -> list[Completion]:
        """Return all completions in the order of the requests; those unfinished at the deadline (monotonic) are ABORTED.
        All dp ranks of an engine call it, also without requests."""
        self.submit(requests)
        done: dict[str, Completion] = {}
        while self.vote(wants_pause=False)[0]:
            if time.monotonic() >= deadline:
                late = [r.request_id for r in requests if r.request_id not in done]
                self.abort(late)
                done |= {name: Completion.empty(name, Status.ABORTED) for name in late}
            done |= {each.request_id: each for each in self.step()}
        return [done[r.request_id] for r in requests]

    def _begin(self) -> None:
        """Hand vLLM as many of the waiting requests as it can run beside those that it has."""
        for request in self._waiting.take(self._rollout.max_num_seqs - len(self._running)):
            own = self._open[request.request_id]
            own.name = self._add(request)
            self._running[request.request_id] = own

    def _add(self, request: GenerationRequest) -> str:
        """Return vLLM's name of a request that is new to it."""
        parameters = exchange.sampling_params(request, stop=self._stop, texts=self._rollout.stop)
        salt = str(self.policy_version) if self._keeps_caches else ""
        name = self._engine.add_request(request.request_id, exchange.engine_prompt(request, salt), parameters)
        if parameters.stop and len(request.own_tokens):
            exchange.remember_text(self._state(name), self._engine.tokenizer, parameters, request)
        return name

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._open:
            raise RolloutError(f"request {request.request_id} is already running on {self.part.name}")
        request.require_fits(self._max_length)

    def _state(self, internal: str) -> Any:
        """Return what vLLM's output processor knows of a request."""
        return self._engine.output_processor.request_states[internal]

    def _step(self) -> list[Completion]:
        outputs = [output for output in self._engine.step() if output.finished]
        ended = []
        for part in self._completions(outputs):
            own = self._open.pop(part.request_id)
            del self._running[part.request_id]
            ended.append(join_completions(own.so_far, part))
        self._round_started &= bool(self._open)
        return ended

    def _completions(self, outputs: Sequence[Any]) -> list[Completion]:
        """Return what came of running requests, by vLLM's outputs."""
        running = [self._running[output.request_id] for output in outputs]
        version = None if self._keeps_caches else self.policy_version
        parts = [
            exchange.completion(output, version=version, engine=self.part.engine, attempt=own.request.attempt)
            for output, own in zip(outputs, running, strict=True)
        ]
        if self._routes is None:
            return parts
        asked = [(own.name, own.request.first_row, out) for own, out in zip(running, outputs, strict=True)]
        routes = self._routes.take(asked)
        return [dataclasses.replace(part, routes=own) for part, own in zip(parts, routes, strict=True)]

    def _settle(self) -> list[Completion]:
        """Take the tokens of the batches that vLLM's asynchronous scheduling has in flight and begin no further one; return
        what ended in them. Without that scheduling (on CPU) nothing is in flight between two steps."""
        core, ended = self._engine.engine_core.engine_core, []
        if core.batch_queue:
            core.pause_scheduler("keep", clear_cache=False)
            while core.batch_queue:
                ended += self._step()
            core.resume_scheduler()
        return ended

    def _require_serving(self) -> None:
        if self._awake != set(_MEMORY):
            raise RolloutError(f"{self.part.name} sleeps (awake: {sorted(self._awake)}); wake it first")
        if self._not_serving:
            raise RolloutError(
                f"{self.part.name} serves nothing: {self._not_serving}\n"
                "a full weight sync that commits makes it serve"
            )

    # -- weights -------------------------------------------------------------------------------------------------

    def receive(self, session: Session) -> list[dict[str, float]]:
        """Takes one session on all workers; blocks until it committed (then the version is visible) or failed.
        Returns the seconds that each worker took.

        WeightSyncError carries the remote tracebacks; the engine then serves nothing until a later session commits.
        """
        if self._running and not self._keeps_caches:
            raise RolloutError(
                f"{self.part.name} has {len(self._running)} running requests; pause it before a weight sync"
            )
        if "weights" not in self._awake:
            raise RolloutError(f"{self.part.name} sleeps; wake its weights before a weight sync")
        before, self._not_serving = self._not_serving, f"{session} did not end"
        answers = self._ask_workers("mrl_receive", dataclasses.asdict(session))
        if error := self._errors("mrl_receive", answers):
            refused = all(answer.get("serving") for answer in answers)
            self._not_serving = before if refused else error
            raise WeightSyncError(error)
        self._become_visible(session.to_version)
        return [answer["seconds"] for answer in answers]

    def _become_visible(self, version: int) -> None:
        """The engine serves what its workers committed. While vLLM keeps requests its prefix cache cannot be emptied; new
        requests do not find what stands there, because theirs is salted with another version."""
        if not self._running and not self._engine.reset_prefix_cache():
            raise RolloutError(f"{self.part.name}: the prefix cache of the old version could not be reset")
        self._engine.set_weight_version(str(version))
        self.policy_version, self._not_serving = version, ""

    # -- memory and end ------------------------------------------------------------------------------------------

    @property
    def can_sleep(self) -> bool:
        """Only CUDA can give an engine's memory away and take it back."""
        import torch

        return self._rollout.enable_sleep_mode and torch.cuda.is_available()

    def sleep(self) -> None:
        """Level 2: weights and KV cache are dropped (the next version comes by weight sync). Nothing happens on CPU."""
        if self._running:
            raise RolloutError(
                f"{self.part.name} has {len(self._running)} running requests; pause it before it sleeps"
            )
        if self.can_sleep and self._awake:
            self._engine.sleep(level=2)
            self._awake.clear()
            reason = "its weights were dropped when it slept"
            self._on_workers("mrl_drop")
            self._not_serving = self._not_serving or reason

    def wake(self, tags: Sequence[str] = _MEMORY) -> None:
        """Takes memory back: weights before a weight sync, the KV cache after it."""
        if unknown := set(tags) - set(_MEMORY):
            raise RolloutError(f"wake knows {list(_MEMORY)}, not {sorted(unknown)}")
        asleep = [tag for tag in tags if tag not in self._awake]
        if self.can_sleep and asleep:
            self._engine.wake_up(asleep)
            self._awake |= set(asleep)

    def close(self) -> None:
        """Ends the workers and frees the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(AttributeError):
                engine.collective_rpc("shutdown_weight_transfer_engine", timeout=10.0)
            engine.engine_core.shutdown()
        self._scratch.close()
