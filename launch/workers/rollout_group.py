"""All engines as one: submit and poll. A prompt's samples go to one engine, chosen by prompt index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.placement import Placement
from mrl.launch.workers.rollout_actor import EngineRank, RolloutActor
from mrl.observe.memory_use import tightest
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Response, ResponseBatch, Round

if TYPE_CHECKING:
    from ray import ObjectRef

    from mrl.resharding.transfer.session import Session


class RolloutGroup(ActorGroup[RolloutActor]):
    """The vLLM engines of a run; engine e has slots e * tp .. e * tp + tp - 1 of those that engines are on
    (`Config.engine_slots`)."""

    kind = "engine"

    def __init__(
        self, config: Config, placement: Placement, clock: PhaseClock, *, sleeps: bool, **options: Any
    ) -> None:
        """`sleeps`: the engines give their memory away between rounds. `options`: environment and log folder
        of the actors."""
        tp = config.rollout.tp
        first_slots = config.engine_slots[::tp]
        # An engine takes no GPU of Ray's: its slots' trainer ranks have, or nobody, and the slots are the run's.
        visible = [placement.visible(range(first, first + tp)) for first in first_slots]
        super().__init__(
            RolloutActor,
            config,
            clock,
            strategies=placement.strategies(first_slots),
            slot_share=0.5,
            gpus=0.0,
            own_environments=visible,
            **options,
        )
        self._sleeps = sleeps

    def start(self) -> dict[str, ObjectRef[None]]:
        """Starts vLLM everywhere; the caller waits for it."""
        return self.start_on_all(RolloutActor.start)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, requested: Round) -> None:
        """Hands each engine its prompts; returns when all engines have them."""
        self.hand_out(RolloutActor.submit, self._shares(requested))

    def poll(self, timeout_seconds: float) -> list[Response]:
        """Finished responses; waits for the first ones at most `timeout_seconds`."""
        return [r for batch in self.pull(RolloutActor.poll, timeout_seconds) for r in batch.responses()]

    def generate(self, requested: Round, deadline_seconds: float) -> list[ResponseBatch]:
        """All responses by one blocking call of each engine; for measurements."""
        calls = {
            self.name(engine): self.start_on(engine, RolloutActor.generate, share, deadline_seconds)
            for engine, share in self._shares(requested).items()
        }
        return list(self.wait(calls).values())

    def _shares(self, requested: Round) -> dict[int, Round]:
        """The prompts of each engine that has any."""
        shares: dict[int, list[Any]] = {}
        for prompt in requested.prompts:
            shares.setdefault(prompt[0] % len(self.actors), []).append(prompt)
        return {engine: Round(tuple(share), requested.sampling) for engine, share in shares.items()}

    # -- weight sync ---------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drops weights and KV cache on all engines that can."""
        if self._sleeps:
            self.on_all(lambda actor: actor.engine.sleep())

    def wake(self, tag: str) -> None:
        """Takes the memory of one kind back: "weights" or "kv_cache"."""
        if self._sleeps:
            self.on_all(lambda actor: actor.engine.wake([tag]))

    def engine_ranks(self) -> list[EngineRank]:
        """All engine ranks, in slot order; WeightSyncError where an engine lacks tensors of the trainer, or
        has others."""
        return [rank for engine in self.on_all(RolloutActor.engine_ranks) for rank in engine]

    def memory_use(self) -> dict[str, float]:
        """The tightest figures of all engine ranks (observe/memory_use.py)."""
        return tightest(
            rank for engine in self.on_all(lambda actor: actor.engine.memory_use()) for rank in engine
        )

    def receive(self, session: Session) -> dict[str, ObjectRef[dict[str, Any]]]:
        """Starts every engine's side of a weight sync; the caller waits for it together with the
        trainer's."""
        return self.start_on_all(lambda actor: actor.engine.receive(session))
