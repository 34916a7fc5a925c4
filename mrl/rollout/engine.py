"""One vLLM engine, driven request by request: submit, step, pause, resume. Not thread-safe.

Token in, token out. This process steps the engine; with tensor parallelism vLLM starts workers, which die
with this process. Weights come only by weight sync (`receive`); an engine without a version serves nothing.

A request outlives weight updates. `pause` takes the running requests out of vLLM at a token boundary and
keeps their tokens; `resume` continues them with the new weights as further segments of the same completion.
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
from mrl.rollout import engine_routes, lockstep, scratch, vllm_convert, vllm_start
from mrl.rollout.engine_process import EngineProcess
from mrl.rollout.engine_workers import EngineWorkers
from mrl.rollout.request import Completion, GenerationRequest, join_completions, next_request
from mrl.rollout.waiting_queue import ALL, NOTHING, TRAINING, WaitingQueue
from mrl.rollout.worker_watch import watch_workers
from mrl.samples import Status

WHOLE = EngineProcess()
"""The only process of an engine."""
_MEMORY = ("weights", "kv_cache")
"""vLLM's tags for the memory that sleep releases."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    original: GenerationRequest
    """The caller's request."""
    request: GenerationRequest
    """The request as it runs or will run next; after a pause `own_tokens` are those generated until then."""
    so_far: Completion | None = None
    """Tokens generated until the last pause."""
    name: str = ""
    """vLLM's internal request id; empty while the request is not in vLLM."""


@dataclasses.dataclass(frozen=True, slots=True)
class PauseReport:
    """Requests and tokens that a pause interrupted."""

    num_requests: int = 0
    """Requests taken out of vLLM with their tokens."""
    num_tokens: int = 0
    """Tokens of their contexts, which vLLM prefills again after the pause."""


class RolloutEngine(EngineWorkers):
    """One engine of a run, or one dp rank of it; worker i runs on the engine's i-th slot."""

    def __init__(
        self,
        rollout: RolloutSection,
        model_path: str,
        *,
        max_length: int,
        seed: int,
        part: EngineProcess = WHOLE,
        meeting: vllm_start.Rendezvous | None = None,
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
            part, meeting: This process of the engine, and the address where the engine's processes meet.
            seed: The run's seed; continued requests derive theirs from it.
            stop_token_ids: The model folder's end-of-text tokens (`end_of_text_ids.end_of_text`).
            deterministic: Disable the prefix cache and accept requests only while the engine is empty.
            real_weights: Load the folder's weights as version 0 (tools, measurements).
            trust_remote_code: Allow the folder's own tokenizer code; `rollout.stop` needs the tokenizer.
            routes: Record the experts that tokens are routed to.
            keeps_caches: Leave requests and their KV cache in vLLM during a pause (stream.kv_cache: keep).
            on_worker_lost: Called in its own thread with the name of a vLLM worker process that died.
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
        model = self._engine.model_config
        self._masked_tokens = model.get_vocab_size() if model.return_sampling_mask else 0
        """See vllm_convert.sampling_params."""
        self._routes = engine_routes.route_source(model_path, self._ask_workers) if routes else None
        watch_workers(self._engine.model_executor, on_worker_lost)
        self.policy_version = -1
        """Newest weight version that all workers committed; -1 before the first."""
        self._not_serving = "it never received weights"
        """Why the engine must not serve; empty if it may. The workers know the state of their own weights."""
        self._open: dict[str, _Open] = {}
        self._waiting = WaitingQueue()
        self._running: dict[str, _Open] = {}
        """Requests in vLLM, by request id; at most rollout.max_num_seqs."""
        self._ended: list[Completion] = []
        """Completions that ended outside a step; the next step returns them."""
        self._round_started = False
        self._awake = set(_MEMORY)
        if real_weights:
            self._become_visible(0)
        self.start_seconds = time.monotonic() - started

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return True if a step has something to do; held requests do not count."""
        return bool(self._running or len(self._waiting) or self._ended)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests; they start in prompt order as vLLM has room.

        Raises:
            RolloutError: A request cannot run, or the engine is deterministic and its round has started.
        """
        requests = list(requests)
        if self._deterministic and self._round_started:
            raise RolloutError(
                f"{self.part.name} is deterministic and its round has started ({len(self._open)} requests "
                "unfinished); submit all requests of a round before its first step"
            )
        for request in requests:
            self._check(request)
            self._open[request.request_id] = _Open(request, request)
        self._waiting.add(requests)

    def step(self) -> list[Completion]:
        """Run one vLLM step if there is work; return the completions. All dp ranks step together."""
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
        """Return the completions that ended outside a step and forget them."""
        ended, self._ended = self._ended, []
        return ended

    def vote(self, *, wants_pause: bool) -> tuple[bool, bool]:
        """Return (any dp rank has work, all want to pause) once every dp rank of the engine has voted."""
        if self.part.dp == 1:
            return self.has_work, wants_pause
        with lockstep.in_lockstep(self.part.name, alone=False):
            any_work, runs = lockstep.all_reduce_max(
                (int(self.has_work), int(not wants_pause)), self._engine.dp_group
            )
        # A rank without requests joins the forward pass of the others with an empty batch.
        idle = not (self._running or len(self._waiting))
        self._engine.should_execute_dummy_batch = bool(any_work) and idle and bool(runs)
        return bool(any_work), not runs

    def pause(self) -> PauseReport:
        """Interrupt all requests at a token boundary until `resume`. Running ones leave vLLM with their
        tokens; with `keeps_caches` they stay in vLLM. The next step returns those that ended meanwhile."""
        self._waiting.hold(ALL)
        self._engine.should_execute_dummy_batch = False
        self._ended += self._settle()
        interrupted, self._round_started = list(self._running.values()), False
        if self._keeps_caches:
            return PauseReport(len(interrupted))
        outputs = [vllm_convert.partial_output(self._state(entry.name)) for entry in interrupted]
        parts = self._completions(outputs)
        self._engine.abort_request([entry.name for entry in interrupted], internal=True)
        self._running.clear()
        for entry, part in zip(interrupted, parts, strict=True):
            entry.so_far, entry.name = join_completions(entry.so_far, part), ""
            entry.request = next_request(entry.original, entry.so_far, self._seed)
        self._waiting.add(entry.request for entry in interrupted)
        contexts = (len(entry.request.prompt_tokens) + len(entry.request.own_tokens) for entry in interrupted)
        return PauseReport(len(interrupted), sum(contexts))

    def snapshot(self) -> list[Completion]:
        """Return the partial rollout of each open request with a token, as PARKED; only while paused."""
        partial = {name: entry.so_far for name, entry in self._open.items() if entry.so_far is not None}
        if self._running:
            outputs = [
                vllm_convert.partial_output(self._state(entry.name)) for entry in self._running.values()
            ]
            for part in self._completions(outputs):
                partial[part.request_id] = join_completions(partial.get(part.request_id), part)
        return [
            dataclasses.replace(part, status=Status.INTERRUPTED)
            for part in partial.values()
            if len(part.tokens)
        ]

    def resume(self, *, training: bool = True) -> None:
        """Let requests run again; with `training` False only those of a validation run."""
        self._waiting.hold(NOTHING if training else TRAINING)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop requests and forget them; unknown ids are ignored."""
        request_ids = [request_id for request_id in request_ids if self._open.pop(request_id, None)]
        running = [self._running.pop(i).name for i in request_ids if i in self._running]
        self._engine.abort_request(running, internal=True)
        self._waiting.remove(request_ids)
        self._round_started &= bool(self._open)

    def generate(self, requests: Sequence[GenerationRequest], *, deadline: float) -> list[Completion]:
        """Return the completions in request order; those unfinished at `deadline` (time.monotonic) are
        ABORTED. Every dp rank of an engine must call it, even without requests."""
        self.submit(requests)
        done: dict[str, Completion] = {}
        while self.vote(wants_pause=False)[0]:
            if time.monotonic() >= deadline:
                late = [r.request_id for r in requests if r.request_id not in done]
                self.abort(late)
                done |= {name: Completion.empty(name, Status.ABORTED) for name in late}
            done |= {ended.request_id: ended for ended in self.step()}
        return [done[r.request_id] for r in requests]

    def _begin(self) -> None:
        """Give vLLM waiting requests until it has rollout.max_num_seqs."""
        for request in self._waiting.take(self._rollout.max_num_seqs - len(self._running)):
            entry = self._open[request.request_id]
            entry.name = self._add(request)
            self._running[request.request_id] = entry

    def _add(self, request: GenerationRequest) -> str:
        """Add a request to vLLM; return its internal id."""
        parameters = vllm_convert.sampling_params(
            request, stop=self._stop, texts=self._rollout.stop, masked_tokens=self._masked_tokens
        )
        salt = str(self.policy_version) if self._keeps_caches else ""
        name = self._engine.add_request(
            request.request_id, vllm_convert.engine_prompt(request, salt), parameters
        )
        if parameters.stop and len(request.own_tokens):
            vllm_convert.restore_detokenizer(self._state(name), self._engine.tokenizer, parameters, request)
        return name

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._open:
            raise RolloutError(f"request {request.request_id} is already running on {self.part.name}")
        request.require_fits(self._max_length)

    def _state(self, internal: str) -> Any:
        """Return the state of a request in vLLM's output processor."""
        return self._engine.output_processor.request_states[internal]

    def _step(self) -> list[Completion]:
        outputs = [output for output in self._engine.step() if output.finished]
        ended = []
        for part in self._completions(outputs):
            entry = self._open.pop(part.request_id)
            del self._running[part.request_id]
            ended.append(join_completions(entry.so_far, part))
        self._round_started &= bool(self._open)
        return ended

    def _completions(self, outputs: Sequence[Any]) -> list[Completion]:
        """Return the completions of running requests from vLLM's outputs."""
        running = [self._running[output.request_id] for output in outputs]
        version = None if self._keeps_caches else self.policy_version
        parts = [
            vllm_convert.completion(
                output, version=version, engine=self.part.engine, attempt=entry.request.attempt
            )
            for output, entry in zip(outputs, running, strict=True)
        ]
        if self._routes is None:
            return parts
        wanted = [
            (entry.name, entry.request.first_row, out) for entry, out in zip(running, outputs, strict=True)
        ]
        routes = self._routes.take(wanted)
        return [dataclasses.replace(part, routes=entry) for part, entry in zip(parts, routes, strict=True)]

    def _settle(self) -> list[Completion]:
        """Drain the batches that vLLM's asynchronous scheduling has in flight; return the completions.
        Without that scheduling (on CPU) nothing is in flight between two steps."""
        core, ended = self._engine.engine_core.engine_core, []
        if core.batch_queue:
            core.pause_scheduler("keep", clear_cache=False)
            while core.batch_queue:
                ended += self._step()
            core.resume_scheduler()
        return ended

    def _require_serving(self) -> None:
        if self._awake != set(_MEMORY):
            raise RolloutError(f"{self.part.name} is asleep (awake: {sorted(self._awake)}); wake it first")
        if self._not_serving:
            raise RolloutError(
                f"{self.part.name} serves nothing: {self._not_serving}\n"
                "it serves again once a full weight sync commits"
            )

    # -- weights ---------------------------------------------------------------------------------------------

    def receive(self, session: Session) -> list[dict[str, float]]:
        """Receive one sync session on all workers, or load the one of `stage`; commit its version and return
        each worker's seconds.

        Raises:
            WeightSyncError: Has the remote tracebacks; the engine serves nothing until a session commits.
        """
        if self._running and not self._keeps_caches:
            raise RolloutError(
                f"{self.part.name} has {len(self._running)} running requests; pause it before a weight sync"
            )
        if "weights" not in self._awake:
            raise RolloutError(f"{self.part.name} is asleep; wake its weights before a weight sync")
        before, self._not_serving = self._not_serving, f"{session} did not end"
        answers = self._ask_workers("mrl_receive", dataclasses.asdict(session))
        if error := self._errors("mrl_receive", answers):
            refused = all(answer.get("serving") for answer in answers)
            self._not_serving = before if refused else error
            raise WeightSyncError(error)
        self._become_visible(session.to_version)
        return [answer["seconds"] for answer in answers]

    def _become_visible(self, version: int) -> None:
        """Serve the version that the workers committed. The prefix cache cannot be reset while vLLM keeps
        requests; new requests never hit its old entries because their cache salt is another version."""
        if not self._running and not self._engine.reset_prefix_cache():
            raise RolloutError(f"{self.part.name}: the prefix cache of the old version could not be reset")
        self._engine.set_weight_version(str(version))
        self.policy_version, self._not_serving = version, ""

    # -- memory and end --------------------------------------------------------------------------------------

    @property
    def can_sleep(self) -> bool:
        """Return True if the engine can release its memory; only CUDA can."""
        import torch

        return self._rollout.enable_sleep_mode and torch.cuda.is_available()

    def sleep(self) -> None:
        """Drop weights and KV cache (level 2); the next weights come by weight sync. On CPU, return unused
        memory to the machine."""
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
        elif not self.can_sleep:
            self._on_workers("mrl_release_free_memory")

    def wake(self, tags: Sequence[str] = _MEMORY) -> None:
        """Allocate memory again: weights before a weight sync, the KV cache after it."""
        if unknown := set(tags) - set(_MEMORY):
            raise RolloutError(f"wake knows {list(_MEMORY)}, not {sorted(unknown)}")
        asleep = [tag for tag in tags if tag not in self._awake]
        if self.can_sleep and asleep:
            self._engine.wake_up(asleep)
            self._awake |= set(asleep)

    def close(self) -> None:
        """End the workers and free the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(AttributeError):
                engine.collective_rpc("shutdown_weight_transfer_engine", timeout=10.0)
            engine.engine_core.shutdown()
        self._scratch.close()
