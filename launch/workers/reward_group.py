"""Reward processes on every node: one actor with a pool on each, behind the interface of a single pool.

A prompt's samples go to one node, chosen by prompt index, so that verifiers of whole groups see them
together. A node that is lost ends the run with its name, as a lost trainer rank does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mrl.config.root import Config
from mrl.errors import ConfigError, RewardError, WorkerLost
from mrl.launch.workers.actor_group import ActorGroup, close_all
from mrl.launch.workers.placement import node_strategies
from mrl.observe.phases import PhaseClock
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool, try_verifiers
from mrl.samples import Prompt, Sample, Verdict

log = logging.getLogger(__name__)

COLLECT_SECONDS = 0.5
"""How long a node's pool waits inside one call for its first verdict."""
CLOSE_SECONDS = 30.0
JUDGED_FOLDER = "judged"
"""In the run folder: what models that judge have answered."""
THREADS = 2
"""A node takes samples while a call waits for its verdicts."""


def pool_of_node(config: Config, node: int) -> RewardPool:
    """Return the reward workers of one node, which keep what judges answer in a folder of their own."""
    folder = str(Path(config.run_folder) / JUDGED_FOLDER / f"node-{node}")
    return RewardPool(config.reward, group_size=config.loop.samples_per_prompt, folder=folder)


def check_rewards(section: RewardSection, prompts: Sequence[Prompt]) -> None:
    """One trial sample through the verifier of each domain; ConfigError with what the verifier said."""
    try:
        try_verifiers(section, prompts)
    except RewardError as error:
        raise ConfigError(f"reward: {error}") from error


class RewardActor:
    """The pool of one node."""

    def __init__(self, config: Config, number: int, log_folder: str) -> None:
        from mrl.launch.workers.actor_log import redirect

        redirect(log_folder, f"rewards-{number}")
        self._section = config.reward
        self._pool = pool_of_node(config, number)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Tries each prompt's verifier on this node; RewardError with what it said."""
        try_verifiers(self._section, prompts)

    def submit_all(self, pairs: Sequence[tuple[Sample, Prompt]]) -> None:
        self._pool.submit_all(pairs)

    def collect(self) -> list[tuple[str, Verdict]]:
        return self._pool.collect(COLLECT_SECONDS)

    def flush_groups(self, prompts: Collection[int]) -> None:
        self._pool.flush_groups(prompts)

    def close(self) -> None:
        """Ends the pool, after a line in the log about its verdicts."""
        log.info("verdicts by kind: %s", dict(self._pool.counts()))
        self._pool.close()


class RewardGroup(ActorGroup[RewardActor]):
    """One actor on each node of the connected cluster that has slots."""

    kind = "rewards of node"

    def __init__(
        self, config: Config, clock: PhaseClock, *, environment: Mapping[str, str], log_folder: str
    ) -> None:
        super().__init__(
            RewardActor,
            config,
            clock,
            strategies=node_strategies(),
            slot_share=0.0,
            gpus=0.0,
            threads=THREADS,
            environment=environment,
            log_folder=log_folder,
        )
        self._deliver: Callable[[str, Verdict], None] = lambda sample_id, verdict: None
        self._closed = threading.Event()
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def started(self, trial: Sequence[Prompt]) -> Iterator[RewardGroup]:
        """The group after a trial of the prompts on each node, closed at the end. Raises ConfigError naming
        the node."""
        try:
            self._check(trial)
            yield self
        finally:
            self.close()

    def _check(self, trial: Sequence[Prompt]) -> None:
        try:
            self.on_all(RewardActor.check, trial)
        except RewardError as error:
            raise ConfigError(f"reward: {error}") from error

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        """Hands each node its prompts' samples; returns when all nodes have them."""
        shares: dict[int, list[tuple[Sample, Prompt]]] = {}
        for sample, prompt in pairs:
            shares.setdefault(prompt.index % len(self.actors), []).append((sample, prompt))
        self.hand_out(RewardActor.submit_all, shares)

    def deliver_to(self, deliver: Callable[[str, Verdict], None]) -> None:
        """Hand every verdict to `deliver`, in a thread of its own, until the group is closed."""
        self._deliver = deliver
        threading.Thread(target=self._collect, name="rewards-in", daemon=True).start()

    def check(self) -> None:
        """Raise what ended the thread that collects verdicts, or WorkerLost if a node's actor is gone."""
        if self._failure is not None:
            raise self._failure
        if dead := self.dead():
            raise WorkerLost(self.death(dead[0]))

    def _collect(self) -> None:
        """Take the verdicts of all nodes while any is owed."""
        try:
            while not self._closed.wait(0.0 if any(self._owed) else COLLECT_SECONDS / 10):
                for verdicts in self.pull(RewardActor.collect, COLLECT_SECONDS):
                    for sample_id, verdict in verdicts:
                        self._deliver(sample_id, verdict)
        except Exception as error:
            if not self._closed.is_set():
                self._failure = error

    def flush_groups(self, prompts: Collection[int]) -> None:
        """Starts group verifiers on the incomplete groups of these prompts on all nodes."""
        self.on_all(RewardActor.flush_groups, prompts)

    def close(self) -> None:
        """Ends the pools, then the actors; one that is gone already is not an error here."""
        self._closed.set()
        close_all([self], deadline_seconds=CLOSE_SECONDS)
