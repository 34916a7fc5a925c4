"""One vLLM engine by single requests: submit, poll, abort. A plain class; its process is its caller's.

Token in, token out. We step the engine ourselves, in this process; with tensor parallelism vLLM starts its own workers,
which die with this process. Weights come by weight sync only (`receive`): an engine that has no committed version serves
nothing. Does not own prompts, groups or retries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.sync import SyncSection
from mrl.errors import RolloutError, WeightSyncError
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.agreement import as_one_rank, require_agreement, require_written_once
from mrl.resharding.planner.manifest import RankManifest, replicas
from mrl.resharding.transfer.session import Session
from mrl.rollout import engine_routes, exchange, lockstep, scratch, vllm_start
from mrl.rollout.kept import Kept
from mrl.rollout.part import Part
from mrl.rollout.request import GenerationRequest, Response, sample_of
from mrl.rollout.waiting import WaitingQueue
from mrl.rollout.worker_watch import watch_workers
from mrl.samples import Status

WHOLE = Part()
"""An engine of one process."""
_MEMORY = ("weights", "kv_cache")
"""vLLM's tags of what sleeps and wakes."""
_RECEIVE_DEADLINES = 20
"""Longest weight sync, in units of sync.deadline_seconds (which bounds each single wait)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """A request that vLLM has."""

    name: str
    """vLLM's."""
    request: GenerationRequest
    first: int = 0
    """Tokens of it that vLLM had drawn for the requests before this one."""


class RolloutEngine:
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
        keeps: bool = False,
        on_worker_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`part`, `meeting`: which process of an engine of several this is, and where they find each other.
        `stop_token_ids`: the folder's end-of-text (`end_of_text_ids.end_of_text`). `deterministic`: no prefix cache, and requests are taken only
        while the engine is empty. `real_weights`: load the folder's weights as version 0 (tools, measurements).
        `trust_remote_code`: the folder's tokenizer, which the engine needs for `rollout.stop`, may be the folder's own code.
        `routes`: responses bring theirs. `keeps`: what a park takes back stays in vLLM with its cache, to go on where it is asked
        again before anything else is.
        `on_worker_lost`: called with its name, in a thread of its own, when one of vLLM's worker processes ended by itself."""
        started = time.monotonic()
        self.part = part
        self._rollout, self._sync = rollout, sync or SyncSection()
        self._deterministic = deterministic
        self._stop = tuple(dict.fromkeys((*stop_token_ids, *rollout.stop_token_ids)))
        self._max_length = max_length
        self._scratch = scratch.Scratch()
        with self._scratch.in_use():
            self._engine: Any = vllm_start.start_engine(
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
        self._waiting = WaitingQueue()
        self._running: dict[str, _Running] = {}
        """What vLLM works at, by its id; at most rollout.max_num_seqs."""
        self._keeps, self._kept = keeps, Kept()
        self._ended: list[Response] = []
        """What ended outside of a step, for the next one."""
        self._round_started = self._busy = False
        self._awake = set(_MEMORY)
        if real_weights:
            self._become_visible(0)
        self.start_seconds = time.monotonic() - started

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests to work at: those that wait for `go_on` are not among them."""
        return len(self._running) + len(self._waiting)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Takes requests, which are begun in the order of prompts where vLLM has room; RolloutError when the engine may not
        serve or a request cannot be run."""
        requests = list(requests)
        self._require_serving()
        if self._deterministic and self._round_started:
            raise RolloutError(
                f"{self.part.name} is deterministic: a round's requests are all submitted before its first "
                f"poll; {self.num_unfinished} of the running round are unfinished"
            )
        for request in requests:
            self._check(request)
        self._waiting.add(requests)

    def _begin(self) -> None:
        """Hands vLLM as many of the waiting requests as it can run beside those that it has; what it kept and is not among
        them it loses."""
        for request in self._waiting.take(self._rollout.max_num_seqs - len(self._running)):
            again = self._kept.again(request)
            name, first = again or (self._add(request), 0)
            self._running[request.request_id] = _Running(name, request, first)
        if self._kept:
            self._engine.abort_request(self._kept.drop(), internal=True)

    def _add(self, request: GenerationRequest) -> str:
        """vLLM's name of a request that is new to it."""
        parameters = exchange.sampling_params(request, stop=self._stop, texts=self._rollout.stop)
        salt = str(self.policy_version) if self._keeps else ""
        name = self._engine.add_request(request.request_id, exchange.engine_prompt(request, salt), parameters)
        if parameters.stop and len(request.own_tokens):
            exchange.remember_text(self._state(name), self._engine.tokenizer, parameters, request)
        return name

    def poll(self, max_seconds: float = 0.0) -> list[Response]:
        """Steps the engine until something finished or the time is over (at least one step); finished responses. Not for dp
        ranks, whose clocks differ."""
        if self.part.dp > 1:
            raise RolloutError(f"{self.part.name} steps together with the others: ask for a number of steps")
        deadline = time.monotonic() + max_seconds
        finished = self.step()
        while self.num_unfinished and not finished and time.monotonic() < deadline:
            finished = self.step()
        return finished

    def step(self, max_steps: int = 1) -> list[Response]:
        """At most so many steps of the engine, fewer where nothing is left to do; what finished in them. All dp ranks of an
        engine call it equally often with the same number."""
        finished, self._ended = self._ended, []
        with lockstep.in_lockstep(self.part.name, alone=self.part.is_whole):
            for _ in range(max_steps):
                if self.num_unfinished:
                    self._require_serving()
                    self._begin()
                if not self._any_busy():
                    break
                self._round_started |= bool(self._running)
                finished += self._step()
        if not self._running:
            finished += self._settle()
        return finished

    def works_for(self, prompt: int) -> bool:
        """Whether it has requests of prompts up to this index, those of a validation aside."""
        names = itertools.chain(self._running, self._waiting.first())
        return any(0 <= sample_of(name)[0] <= prompt for name in names)

    def goes_on_working(self, wanted: bool) -> bool:
        """Whether there is work for another step() and that is wanted; the dp ranks of an engine all call it, and agree."""
        if self.part.dp == 1:
            return wanted and bool(self.num_unfinished)
        with lockstep.in_lockstep(self.part.name, alone=False):
            return self._busy and not lockstep.largest(int(not wanted), self._engine.dp_group)

    def park(self, max_steps: int = 0) -> list[Response]:
        """Takes every request out of vLLM, in the order they came; each comes back PARKED with its tokens so far, none where
        nothing was drawn yet; before them what had ended and not been polled. Those that vLLM does not have wait for `go_on`.

        Where so many steps surely end all of them they end instead: that costs less than computing their tokens again. All dp
        ranks of an engine call it together with the same number, and decide that together.
        """
        self._waiting.hold()
        left = max((exchange.num_left(self._state(own.name)) for own in self._running.values()), default=0)
        if self.part.dp > 1:
            with lockstep.in_lockstep(self.part.name, alone=False):
                left = lockstep.largest(left, self._engine.dp_group)
        ended = self.step(max_steps if left <= max_steps else 0) + self._settle()
        outputs = [exchange.unfinished(self._state(own.name)) for own in self._running.values()]
        parked = self._take(outputs)
        if self._keeps:
            for (request_id, own), output in zip(self._running.items(), outputs, strict=True):
                drawn = output.outputs[0].token_ids
                self._kept.keep(request_id, own.name, output.prompt_token_ids, drawn)
        else:
            self._engine.abort_request([own.name for own in self._running.values()], internal=True)
        self._running.clear()
        self._round_started = False
        return ended + [dataclasses.replace(response, status=Status.PARKED) for response in parked]

    def go_on(self) -> None:
        """What waited since a park may be begun again."""
        self._waiting.go_on()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stops requests; each comes back from the next poll as ABORTED without tokens. Unknown ids are ignored."""
        request_ids = list(request_ids)
        running = [i for i in request_ids if i in self._running]
        self._engine.abort_request([self._running.pop(i).name for i in running], internal=True)
        stopped = running + self._waiting.remove(request_ids)
        self._ended += [Response.empty(i, Status.ABORTED) for i in stopped]
        self._round_started &= bool(self.num_unfinished)

    def generate(self, requests: Sequence[GenerationRequest], *, deadline: float) -> list[Response]:
        """All responses in the order of the requests; those unfinished at the deadline (monotonic) are aborted. All dp ranks of
        an engine call it, also with no requests."""
        self.submit(requests)
        ids, done = {r.request_id for r in requests}, {}
        self._busy = True
        while len(done) < len(requests) or (self.part.dp > 1 and self._busy):
            if time.monotonic() >= deadline:
                self.abort([i for i in ids if i not in done])
            done.update((r.request_id, r) for r in self.step() if r.request_id in ids)
        return [done[r.request_id] for r in requests]

    def _any_busy(self) -> bool:
        """Whether this rank has requests, or another dp rank; where only others have, vLLM's next step is an empty batch."""
        own = bool(self._running)
        self._busy = self._engine.has_unfinished_requests() if self.part.dp > 1 else own
        return self._busy

    def _check(self, request: GenerationRequest) -> None:
        if request.request_id in self._running or request.request_id in self._waiting:
            raise RolloutError(f"request {request.request_id} is already running on {self.part.name}")
        request.require_fits(self._max_length)

    def _state(self, internal: str) -> Any:
        """What vLLM's output processor knows of a request."""
        return self._engine.output_processor.request_states[internal]

    def _step(self) -> list[Response]:
        outputs = [output for output in self._engine.step() if output.finished]
        finished = self._take(outputs)
        for output in outputs:
            del self._running[output.request_id]
        self._round_started &= bool(self.num_unfinished)
        return finished

    def _take(self, outputs: Sequence[Any]) -> list[Response]:
        """What came of requests, by vLLM's outputs."""
        running = [self._running[output.request_id] for output in outputs]
        responses = [
            exchange.response(
                output,
                version=self.policy_version,
                engine=self.part.engine,
                attempt=own.request.attempt,
                first=own.first,
            )
            for output, own in zip(outputs, running, strict=True)
        ]
        if self._routes is None:
            return responses
        asked = [(own.name, own.request.first_row, out) for own, out in zip(running, outputs, strict=True)]
        routes = self._routes.take(asked)
        return [dataclasses.replace(r, routes=own) for r, own in zip(responses, routes, strict=True)]

    def _settle(self) -> list[Response]:
        """Takes the tokens of the batches that vLLM's asynchronous scheduling has in flight and begins no further one; what
        finished in them. Without that scheduling (on CPU) nothing is in flight between two steps."""
        core, finished = self._engine.engine_core.engine_core, []
        if core.batch_queue:
            core.pause_scheduler("keep", clear_cache=False)
            while core.batch_queue:
                finished += self._step()
            core.resume_scheduler()
        return finished

    def _require_serving(self) -> None:
        if self._awake != set(_MEMORY):
            raise RolloutError(f"{self.part.name} sleeps (awake: {sorted(self._awake)}); wake it first")
        if self._not_serving:
            raise RolloutError(
                f"{self.part.name} serves nothing: {self._not_serving}\n"
                "a full weight sync that commits makes it serve"
            )

    # -- weights -------------------------------------------------------------------------------------------------

    def prepare_sync(self, host: str | None = None) -> list[str]:
        """The addresses of this engine's workers, by tensor-parallel rank; the same at every call.

        `host`: this machine's address, needed where sync.transport is not auto.
        """
        answers = self._on_workers("mrl_prepare_sync", self._sync.deadline_seconds, host)
        return [a["address"] for a in answers]

    def devices(self) -> list[str]:
        """The UUID of each worker's GPU, by tensor-parallel rank; "cpu" without one."""
        return [a["device"] for a in self._on_workers("mrl_device")]

    def memory_use(self) -> list[dict[str, float]]:
        """What each worker's process has of its GPU and host, by tensor-parallel rank (observe/memory_use.py)."""
        return [a["use"] for a in self._on_workers("mrl_memory_use")]

    def engine_manifests(self, checkpoint: Sequence[CheckpointTensor]) -> list[RankManifest]:
        """Where each worker's own loaders put every checkpoint tensor, by tensor-parallel rank (ranks from 0).

        WeightSyncError names the tensors that engine and checkpoint do not both have, or not in one shape.
        """
        rows = [(t.name, t.shape, t.dtype, t.stack) for t in checkpoint]
        manifests = [a["manifest"] for a in self._on_workers("mrl_manifest", rows)]
        if self.part.dp == 1:  # else each dp rank has a part of the experts (RolloutGroup.engine_ranks)
            require_agreement([as_one_rank(checkpoint)], manifests)
        for group in replicas(manifests):
            require_written_once(group)
        return manifests

    def receive(self, session: Session) -> dict[str, Any]:
        """Takes one session on all workers; blocks until it committed (then the version is visible) or failed.

        WeightSyncError carries the remote tracebacks; the engine then serves nothing until a later session commits.
        """
        if self._running:
            raise RolloutError(
                f"{self.part.name} has {self.num_unfinished} unfinished requests; finish or abort them before "
                "a weight sync: a response never mixes versions"
            )
        if "weights" not in self._awake:
            raise RolloutError(f"{self.part.name} sleeps; wake its weights before a weight sync")
        started = time.monotonic()
        before, self._not_serving = self._not_serving, f"{session} did not end"
        answers = self._ask_workers("mrl_receive", dataclasses.asdict(session))
        if error := self._errors("mrl_receive", answers):
            refused = all(answer.get("serving") for answer in answers)
            self._not_serving = before if refused else error
            raise WeightSyncError(error)
        self._become_visible(session.to_version)
        stats = {k: [a[k] for a in answers] for k in ("num_tensors", "num_bytes", "seconds")}
        return {**stats, "total_seconds": time.monotonic() - started}

    def release_sync(self) -> None:
        """Unmaps the trainer's buffers on all workers; the trainer may free them afterwards."""
        self._on_workers("mrl_release_sync")

    def _become_visible(self, version: int) -> None:
        """The engine serves what its workers committed. While vLLM keeps requests its prefix cache cannot be emptied; new
        requests do not find what stands there, because theirs is salted with another version."""
        if not self._kept and not self._engine.reset_prefix_cache():
            raise RolloutError(f"{self.part.name}: the prefix cache of the old version could not be reset")
        self._engine.set_weight_version(str(version))
        self.policy_version, self._not_serving = version, ""

    def _on_workers(self, call: str, *arguments: Any) -> list[dict[str, Any]]:
        """One call on every worker; WeightSyncError with every failing worker's traceback."""
        answers = self._ask_workers(call, *arguments)
        if error := self._errors(call, answers):
            raise WeightSyncError(error)
        return answers

    def _ask_workers(self, call: str, *arguments: Any) -> list[dict[str, Any]]:
        """Every worker's answer to a call of its extension, which vLLM reaches by name; an error is an answer too."""
        timeout = self._sync.deadline_seconds * _RECEIVE_DEADLINES
        return self._engine.collective_rpc(call, timeout=timeout, args=arguments)

    def _errors(self, call: str, answers: Sequence[dict[str, Any]]) -> str:
        errors = [f"worker {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
        return f"{self.part.name}, {call}: " + "\n".join(errors) if errors else ""

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
                f"{self.part.name} has {self.num_unfinished} unfinished requests; it cannot sleep"
            )
        if self.can_sleep and self._awake:
            self._engine.sleep(level=2)
            self._awake.clear()
            reason = "its weights were dropped when it slept"
            self._on_workers("mrl_drop", reason)
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
