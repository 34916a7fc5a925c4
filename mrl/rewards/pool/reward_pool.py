"""Pool of verifiers that run during generation: submit finished samples, collect verdicts as they arrive.

consumes      submit(sample, prompt), from one thread
produces      collect(timeout) -> [(sample_id, Verdict)], every sample exactly once, in order of completion;
              or calls of the `deliver_to` callback in the dispatcher's thread or in submit
waits for     room in the queue (submit) and verdicts (collect), both with a deadline
unblocked by  the dispatcher's thread
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType

from mrl.errors import RewardError
from mrl.rewards.causes import CauseLog
from mrl.rewards.contract import RewardRequest, no_reward, rejected, request_for
from mrl.rewards.kinds.environment_return import return_of
from mrl.rewards.kinds.ground_truth import correct_response, ground_truth_of
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection, RewardSpec
from mrl.rewards.pool.dispatch import Dispatcher
from mrl.rewards.pool.queues import StageQueue, queues_of
from mrl.rewards.pool.tickets import SampleScore
from mrl.rewards.pool.trial import TRIAL_RESPONSE, trial_sample
from mrl.rewards.pool.work import Task
from mrl.rewards.reward_part import RewardPart
from mrl.samples import Prompt, Sample, Status, Verdict, VerdictKind

_log = logging.getLogger(__name__)

QUEUE_LIMIT = 4096
"""Largest number of open samples; submit waits while it is reached."""
NO_REWARD_ALARM = 0.02
"""Share of samples without a reward above which an error is logged."""
_ALARM_FROM = 50
"""Samples needed before the share is meaningful."""


class RewardPool:
    """Verifiers of a run. Their processes start on first need and end with `close` or with this process."""

    def __init__(
        self,
        section: RewardSection,
        *,
        group_size: int | None = None,
        folder: str | None = None,
        check: Callable[[], None] = lambda: None,
        is_quiet: bool = False,
    ) -> None:
        """Create the pool; workers start on first need.

        Args:
            group_size: Samples that complete a group; required if a verifier scores whole groups.
            folder: The run's folder, for data that outlasts a worker: the replies of judge models.
            check: Called with every submit and collect; raises what ends the run.
            is_quiet: Do not log samples without a reward; the caller reports them.
        """
        grouped = [part.label for part in section.all_verifiers() if part.group]
        if grouped and group_size is None:
            raise RewardError(f"verifiers {grouped} score whole groups; RewardPool needs group_size")
        self._section = section
        self._group_size, self._folder, self._check = group_size, folder, check
        self._is_quiet = is_quiet
        self._queues: dict[str, StageQueue] = {}
        self._queues_by_part: dict[int, StageQueue] = {}
        self._open: dict[str, SampleScore] = {}
        self._uncollected: set[str] = set()
        """Submitted samples whose verdict was not collected: open ones and those with a waiting verdict."""
        self._gated: dict[str, tuple[Sample, Prompt]] = {}
        """Samples with verifiers that wait for a gate."""
        self._waiting_groups: dict[tuple[int, str], list[tuple[SampleScore, RewardRequest, RewardPart]]] = (
            collections.defaultdict(list)
        )
        self._verdicts: queue.SimpleQueue[tuple[str, Verdict]] = queue.SimpleQueue()
        self._deliver: Callable[[str, Verdict], None] | None = None
        self._room = threading.Condition()
        self._kinds: collections.Counter[str] = collections.Counter()
        self._causes = CauseLog(_log)
        self._alarmed = False
        self._closed = False
        self._counts: collections.Counter[str] = collections.Counter()
        self._dispatcher = Dispatcher()
        self._dispatcher.start()

    def submit(self, sample: Sample, prompt: Prompt, *, deadline_seconds: float = 600.0) -> None:
        """Submit one sample (`submit_all`)."""
        self.submit_all([(sample, prompt)], deadline_seconds=deadline_seconds)

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]], *, deadline_seconds: float = 600.0) -> None:
        """Submit samples; return at once unless the queue is full.

        The dispatcher wakes after the last sample; else it would slow the caller and send many small batches.

        Raises:
            RewardError: The deadline passed; or, before any is submitted, a sample is duplicate or its
                verdict was not collected yet, or a domain has no verifier.
        """
        self.check()
        deadline = time.monotonic() + deadline_seconds
        pairs = list(pairs)
        specs = [self._spec(prompt) for _, prompt in pairs]
        self._refuse_duplicates([sample.sample_id for sample, _ in pairs])
        try:
            for (sample, prompt), spec in zip(pairs, specs, strict=True):
                self._submit(sample, prompt, spec, deadline)
        finally:
            self._dispatcher.wake()

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        """Return all available verdicts; wait up to `timeout_seconds` for the first one."""
        self.check()
        verdicts: list[tuple[str, Verdict]] = []
        deadline = time.monotonic() + timeout_seconds
        try:
            verdicts.append(self._verdicts.get(timeout=max(0.0, deadline - time.monotonic())))
            while True:
                verdicts.append(self._verdicts.get_nowait())
        except queue.Empty:
            self._uncollected.difference_update(sample_id for sample_id, _ in verdicts)
            return verdicts

    def score_all(
        self, pairs: Sequence[tuple[Sample, Prompt]], *, deadline_seconds: float
    ) -> dict[str, Verdict]:
        """Submit samples as complete groups and return their verdicts by sample id.

        Raises:
            RewardError: A verdict is missing at the deadline.
        """
        deadline = time.monotonic() + deadline_seconds
        self.submit_all(pairs, deadline_seconds=deadline_seconds)
        self.flush_groups({sample.prompt_index for sample, _ in pairs})
        verdicts: dict[str, Verdict] = {}
        while len(verdicts) < len(pairs):
            if time.monotonic() > deadline:
                late = len(pairs) - len(verdicts)
                raise RewardError(
                    f"{late} of {len(pairs)} responses had no verdict after {deadline_seconds:g} s"
                )
            verdicts |= self.collect(min(1.0, max(0.0, deadline - time.monotonic())))
        return verdicts

    def deliver_to(self, deliver: Callable[[str, Verdict], None]) -> None:
        """Pass every verdict to `deliver` as it arrives, instead of `collect`."""
        self._deliver = deliver

    def flush_groups(self, prompts: Collection[int]) -> None:
        """Start group verifiers on the incomplete groups of these prompts, which get no more samples."""
        for key in [key for key in self._waiting_groups if key[0] in prompts]:
            self._start_group(key)
        self._dispatcher.wake()

    def check(self) -> None:
        """Raise RewardError, or the error of the caller's check, if no more verdicts can arrive."""
        if self._closed:
            raise RewardError("rewards: the pool is closed")
        if self._dispatcher.failure is not None:
            raise RewardError(f"rewards: the dispatcher failed: {self._dispatcher.failure!r}") from None
        self._check()

    @property
    def num_open(self) -> int:
        """Number of submitted samples without a verdict."""
        return len(self._open)

    def counts(self) -> Mapping[str, int]:
        """Return the counts of verdicts by kind, failures, lost processes, limits and poisonous samples."""
        return {**self._kinds, **self._counts}

    def close(self) -> None:
        """End every reward worker. Open samples get no verdict."""
        if not self._closed:
            self._closed = True
            self._dispatcher.stop()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_duplicates(self, sample_ids: Sequence[str]) -> None:
        counts = collections.Counter(sample_ids)
        twice = [name for name, count in counts.items() if count > 1 or name in self._uncollected]
        if twice:
            raise RewardError(
                f"rewards: submitted twice: {', '.join(twice[:5])}{', ...' if len(twice) > 5 else ''}; "
                "no sample of this call was submitted"
            )

    def _submit(self, sample: Sample, prompt: Prompt, spec: RewardSpec, deadline: float) -> None:
        ticket = SampleScore(sample.sample_id, spec.verifiers(), len(sample.response_tokens))
        with self._room:
            self._await_room(deadline)
            self._open[sample.sample_id] = ticket
            self._uncollected.add(sample.sample_id)
        if sample.status in (Status.FAILED, Status.ABORTED):
            self._finish(ticket, no_reward(f"no response to verify: {_why(sample)}"))
            return
        parts = ticket.begin()
        if ticket.waiting:
            self._gated[sample.sample_id] = sample, prompt
        for part in parts:
            self._submit_part(ticket, part, sample, prompt)

    def _await_room(self, deadline: float) -> None:
        """Wait for room in the queue while earlier samples are scored; the caller has locked `_room`."""
        if len(self._open) < QUEUE_LIMIT:
            return
        self._dispatcher.wake()
        if not self._room.wait_for(
            lambda: len(self._open) < QUEUE_LIMIT, timeout=deadline - time.monotonic()
        ):
            raise RewardError(
                f"rewards: {QUEUE_LIMIT} samples are waiting and none was scored before the deadline"
            )

    def _spec(self, prompt: Prompt) -> RewardSpec:
        try:
            return self._section.for_domain(prompt.domain)
        except KeyError as error:
            raise RewardError(
                f"{prompt.row}: domain {prompt.domain!r} has no verifier: {error.args[0]}"
            ) from error

    def _submit_part(self, ticket: SampleScore, part: RewardPart, sample: Sample, prompt: Prompt) -> None:
        if part.kind == "environment":
            self._record_verdict(ticket, part, return_of(sample))
            return
        if part.reject_truncated and sample.status is Status.TRUNCATED:
            self._record_verdict(ticket, part, rejected("the response reached its token limit"))
            return
        ground_truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(ticket.parts) == 1)
        request = request_for(
            sample, prompt, ground_truth=ground_truth, deadline_seconds=part.deadline_seconds
        )
        if not part.group:
            self._start((request,), (ticket,), part)
            return
        key = (sample.prompt_index, part.label)
        self._waiting_groups[key].append((ticket, request, part))
        if len(self._waiting_groups[key]) == self._group_size:
            self._start_group(key)

    def _start_group(self, key: tuple[int, str]) -> None:
        members = self._waiting_groups.pop(key)
        requests = tuple(request for _, request, _ in members)
        self._start(requests, tuple(ticket for ticket, _, _ in members), members[0][2])

    def _start(
        self, requests: tuple[RewardRequest, ...], tickets: tuple[SampleScore, ...], part: RewardPart
    ) -> None:
        def done(verdicts: Sequence[Verdict | None]) -> None:
            for ticket, verdict in zip(tickets, verdicts, strict=True):
                self._record_verdict(ticket, part, verdict)

        self._dispatcher.put(self._queue(part), Task(requests, done))

    def _queue(self, part: RewardPart) -> StageQueue:
        """Return the queue of a part's first stage; parts with equal workers share one."""
        if (known := self._queues_by_part.get(id(part))) is not None:
            return known
        with self._room:  # the dispatcher's thread comes here when a gate opens
            if id(part) not in self._queues_by_part:  # ids stay valid: the section owns the parts
                kind = reward_kind(part, self._folder)
                key = kind.worker_key()
                if key not in self._queues:
                    self._queues[key] = queues_of(kind, self._section, self._counts)
                self._queues_by_part[id(part)] = self._queues[key]
            return self._queues_by_part[id(part)]

    def _record_verdict(self, ticket: SampleScore, part: RewardPart, verdict: Verdict | None) -> None:
        """Record a part's verdict, in the dispatcher's thread or, without a worker, in submit."""
        if verdict is not None and verdict.kind is VerdictKind.REJECTED:
            verdict = dataclasses.replace(verdict, value=part.min_reward)
        with self._room:
            complete = ticket.record(part.label, verdict)
            opened = ticket.opened()
        if complete is not None:
            self._finish(ticket, complete)
        if opened:
            for opened_part in opened:
                self._submit_part(ticket, opened_part, *self._gated[ticket.sample_id])
            self._dispatcher.wake()

    def _finish(self, ticket: SampleScore, verdict: Verdict) -> None:
        with self._room:
            self._open.pop(ticket.sample_id, None)
            self._gated.pop(ticket.sample_id, None)
            self._kinds[verdict.kind.value] += 1
            self._room.notify()
        if verdict.kind is VerdictKind.NO_REWARD:
            if not self._is_quiet:
                self._causes.note(f"rewards: sample {ticket.sample_id} has no reward", verdict.reason)
            self._alarm()
        if self._deliver is None:
            self._verdicts.put((ticket.sample_id, verdict))
        else:
            self._uncollected.discard(ticket.sample_id)
            self._deliver(ticket.sample_id, verdict)

    def _alarm(self) -> None:
        total = sum(self._kinds.values())
        share = self._kinds[VerdictKind.NO_REWARD.value] / max(total, 1)
        if total >= _ALARM_FROM and share > NO_REWARD_ALARM and not self._alarmed:
            self._alarmed = True
            _log.error(
                "rewards: %.1f%% of %d samples have no reward; a verifier is failing", 100 * share, total
            )


def _why(sample: Sample) -> str:
    if sample.transcript is None:
        return f"generation {sample.status.value}"
    return f"the episode ended by {sample.transcript.ended_by}: {sample.transcript.reason}"


def try_verifiers(
    section: RewardSection, prompts: Sequence[Prompt], *, deadline_seconds: float = 120.0
) -> None:
    """Start every verifier and score one sample per domain, before engines start.

    If a verifier returns None for it, try all prompts with an incorrect and, if known, the correct response.

    Raises:
        RewardError: A verifier failed, with its domain and error, or returned only None.
    """
    for part in {part.kind: part for part in section.all_verifiers()}.values():
        reward_kind(part).announce()
    once = section.model_copy(update={"retries": 0})
    with RewardPool(once, group_size=1, is_quiet=True) as pool:
        firsts = [(prompt, TRIAL_RESPONSE) for prompt in first_of_each_domain(prompts)]
        for domain in _try(pool, section, firsts, deadline_seconds):
            domain_prompts = [prompt for prompt in prompts if prompt.domain == domain]
            texts = [
                (prompt, text) for prompt in domain_prompts for text in _trial_responses(section, prompt)
            ]
            if len(_try(pool, section, texts, deadline_seconds, lenient=True)) == len(texts):
                raise RewardError(
                    f"the verifier of domain {domain!r} returned None for all {len(texts)} trial responses, "
                    "and samples without a reward are not trained on: return a number, 0 if a response is "
                    "incorrect"
                )


def _trial_responses(section: RewardSection, prompt: Prompt) -> list[str]:
    correct = correct_response(section, prompt)
    return [TRIAL_RESPONSE] if correct is None else [TRIAL_RESPONSE, correct]


def _try(
    pool: RewardPool,
    section: RewardSection,
    texts: Sequence[tuple[Prompt, str]],
    deadline_seconds: float,
    *,
    lenient: bool = False,
) -> list[str]:
    """Verify responses; return the domain of each response for which every verifier returned None. Raise
    RewardError for one without a verdict, unless `lenient`."""
    pairs = [
        (trial_sample(dataclasses.replace(prompt, index=number), text), prompt)
        for number, (prompt, text) in enumerate(texts)
        if section.domains.get(prompt.domain, section).kind != "environment"
    ]
    verdicts = pool.score_all(pairs, deadline_seconds=deadline_seconds)
    left_out: list[str] = []
    for sample, prompt in pairs:
        verdict = verdicts[sample.sample_id]
        if not verdict.applies:
            left_out.append(prompt.domain)
        elif verdict.kind is VerdictKind.NO_REWARD and not lenient:
            raise RewardError(
                f"the verifier of domain {prompt.domain!r} failed on a trial sample, whose response is "
                f"{sample.response_text[:60]!r}: {verdict.reason}"
            )
    return left_out


def first_of_each_domain(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompt of each domain."""
    return list({prompt.domain: prompt for prompt in reversed(prompts)}.values())
