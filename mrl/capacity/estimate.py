"""Estimate the memory, link traffic and time of a configuration on its hardware.

This file combines the estimates; the formulas are in the other files of the folder. Nothing is started.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from mrl.capacity import requirements
from mrl.capacity.activations import activations, head_bytes
from mrl.capacity.auto_settings import resolve_auto
from mrl.capacity.decode_time import Generation, generation
from mrl.capacity.hardware import Hardware
from mrl.capacity.host_memory import (
    host_moments,
    num_earlier_weights,
    object_store_bytes,
    rollout_buffer_bytes,
)
from mrl.capacity.judge_memory import judge_bytes
from mrl.capacity.memory_timeline import Event, SlotMemory, timeline, timeline_of_pools
from mrl.capacity.model_facts import critic_facts, find_facts, teacher_facts
from mrl.capacity.phase_deadlines import Wait, waits
from mrl.capacity.rollout_memory import EngineMemory, engine_memory
from mrl.capacity.saving import Exporting, Saving, exporting, saves, saving
from mrl.capacity.step_time import Part, microbatches, total, work_of
from mrl.capacity.traffic import Traffic, traffic
from mrl.capacity.training_memory import (
    GRADIENT_BYTES,
    RankMemory,
    StageMemory,
    stage_memory,
    teacher_target_bytes,
)
from mrl.capacity.training_time import LINK, TrainingTime, to_host_and_back, training_time
from mrl.config.root import Config
from mrl.models.adapters import num_elements
from mrl.models.hf_config import different_values
from mrl.resharding.planner.manifest import DTYPE_BYTES


class Estimate:
    """Capacity estimate of a configuration; each part is computed on first access."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        """Read the model's config.json; raise ConfigError if the model is unknown."""
        self.hardware, self.on_gpus = hardware, hardware.kind == "gpu"
        self.facts = find_facts(config.model)
        config = resolve_auto(config, gpus=self.on_gpus, memory_bytes=hardware.host_memory_bytes)
        self.config = config  # which the nodes need
        self.config = config.as_placed(gpus=self.on_gpus, one_node=self.nodes[-1] == 0)
        self.layout = config.training.layout.sizes()
        self.work = work_of(config, hardware)

    @cached_property
    def unmet(self) -> list[str]:
        """Reasons why `mrl train` would not start; the other parts are only valid if there are none."""
        gpus = self.hardware.gpus_per_node * self.on_gpus
        return [
            *requirements.unmet(self.config, self.facts.hf, self.nodes, gpus=self.on_gpus),
            *requirements.reward_engines(self.config, gpus=gpus, joins=self.nodes[-1] > 0),
        ]

    @cached_property
    def nodes(self) -> list[int]:
        """Node number of each slot."""
        per_node = self.config.launch.slots_per_node or self.hardware.gpus_per_node
        return requirements.node_numbers(self.config.num_slots, per_node)

    @property
    def sleeps(self) -> bool:
        """True if the engine frees its memory while the trainer runs."""
        return self.config.rollout.enable_sleep_mode and self.on_gpus

    @property
    def offloads(self) -> bool:
        """True if the trainer frees its memory while the engine serves."""
        return self.config.training.offloads(gpus=self.on_gpus)

    @cached_property
    def microbatches(self) -> tuple[int, int]:
        """Tokens of the largest micro-batch, and micro-batches per update and data-parallel rank."""
        return microbatches(self.config, self.work, self.facts)

    @cached_property
    def stages(self) -> list[RankMemory]:
        """Memory of a trainer rank of each pipeline stage during an update."""
        training, (tokens, count) = self.config.training, self.microbatches
        policy, critic = stage_memory(self.facts, training), self._critic()
        kept = [
            activations(
                self.facts,
                training,
                self.layout,
                stage=stage,
                tokens=tokens,
                num_microbatches=count,
                fused=self.on_gpus,
            )
            for stage in range(self.layout.pp)
        ]
        return [RankMemory(*parts) for parts in zip(policy, critic, kept, strict=True)]

    def _critic(self) -> list[StageMemory]:
        """Return the critic's stages, zeros without one; it needs no activations besides the policy's."""
        if self.config.critic is None:
            return [StageMemory(0, 0, 0, 0, 0, 0)] * self.layout.pp
        training = self.config.training.model_copy(update={"optimizer": self.config.critic.optimizer})
        return stage_memory(critic_facts(self.config, self.facts), training, value_head=True)

    @cached_property
    def _teachers(self) -> list[tuple[int, bool]]:
        """Bytes of each teacher's weights on its fullest rank, and True if it is a model of its own, which is
        on the device during its pass. The start under adapters is not among them: it has no copy."""
        sizes = []
        for facts in teacher_facts(self.config, self.facts):
            training = self.config.training.for_teacher(has_experts=bool(facts.num_experts))
            apart = bool(different_values(self.facts.hf, facts.hf))
            sizes.append((max(stage.weights for stage in stage_memory(facts, training)), apart))
        return sizes

    @cached_property
    def fullest_stage(self) -> int:
        """Stage whose update needs most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @cached_property
    def engine(self) -> EngineMemory:
        """Memory of one engine rank."""
        return engine_memory(self.facts, self.config.rollout, self.hardware)

    @cached_property
    def slot(self) -> SlotMemory:
        """Memory of the fullest trainer rank and of the engine rank on the same slot."""
        facts, rollout, rank = self.facts, self.config.rollout, self.stages[self.fullest_stage]
        expert = facts.parameters_routed // max(1, facts.num_layers) // rollout.ranks
        table = facts.vocab * facts.hidden // rollout.tp
        tokens, _ = self.microbatches
        return SlotMemory(
            weights=rank.policy.weights,
            gradients=rank.policy.gradients,
            optimizer=rank.policy.optimizer,
            critic=rank.critic.total,
            activations=rank.activations.kept,
            working=rank.activations.working,
            teacher_targets=teacher_target_bytes(self.config, self.facts, self.work)
            + max((size for size, apart in self._teachers if apart), default=0),
            log_prob_working=head_bytes(facts, self.config.training, self.layout, tokens, backward=False),
            engine_weights=self.engine.weights + self.engine.derived,
            engine_working=self.engine.working,
            kv_cache=self.engine.kv_cache,
            buckets=4 * self.config.sync.bucket_bytes,  # two to send from, two to receive in
            staging=max(expert, table) * DTYPE_BYTES[rollout.dtype],
            new_weights=0 if self.on_gpus else self._taken_bytes,
            judges=judge_bytes(self.config.reward.engines, self.hardware),
        )

    @cached_property
    def timeline(self) -> list[Event]:
        """Slot memory after every event of a step; of both resource pools if engines have their own slots."""
        if self.config.launch.engine_slots:
            return timeline_of_pools(self.slot, self.hardware)
        return timeline(self.slot, self.hardware, sleeps=self.sleeps, offloads=self.offloads)

    @cached_property
    def host(self) -> list[Event]:
        """Host memory of one node, the driver's, at the moments of highest use."""
        slot, ranks = self.slot, min(self.hardware.gpus_per_node, self.layout.world_size)
        exports = self.config.export.every_steps > 0
        engines = Counter(self.nodes[slot] for slot in self.config.engine_slots)
        fullest = engines[0] or max(engines.values())
        return host_moments(
            memory=self.hardware.host_memory_bytes,
            store=self.object_store_bytes,
            pool=rollout_buffer_bytes(self.config),
            offloaded=((slot.weights + slot.optimizer + slot.critic) * self.offloads + self.resting_bytes)
            * ranks,
            reference=slot.weights * num_earlier_weights(self.config) * ranks,
            teachers=sum(size for size, _ in self._teachers) * ranks,
            saving=self.saving.host_bytes * saves(self.config),
            export=self.exporting.host_bytes * exports,
            new_weights=self._taken_bytes * fullest if self.on_gpus else 0,
            with_engines=engines[0] > 0,
        )

    @property
    def _taken_bytes(self) -> int:
        """Bytes of new weights that an engine rank has besides its own."""
        return self.engine.weights if self.config.sync.overlap == "on" else 0

    @property
    def object_store_bytes(self) -> int:
        """Bytes of a step in Ray's object store of one node."""
        slots = self.hardware.gpus_per_node
        return object_store_bytes(self.config, self.facts, self.work, slots_per_node=slots)

    @cached_property
    def saving(self) -> Saving:
        """One checkpoint."""
        lora, facts = self.config.training.lora, self.facts
        count = facts.parameters_total if lora is None else num_elements(facts.family, facts.hf, lora)
        models = [(count, [rank.policy for rank in self.stages])]
        if self.config.critic is not None:
            models.append((critic_facts(self.config, self.facts).parameters_total, self._critic()))
        return saving(self.config, self.hardware, models)

    @cached_property
    def exporting(self) -> Exporting:
        """One Hugging Face folder."""
        return exporting(self.config, self.hardware, self.facts)

    @cached_property
    def waits(self) -> list[Wait]:
        """Waits that have a deadline; none if the hardware's speed is unknown."""
        if not self.hardware.has_speeds:
            return []
        return list(waits(self.config, self.work, self.seconds, self.saving, self.exporting))

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes that one weight sync moves over each kind of link."""
        return traffic(
            self.facts,
            self.config.rollout,
            self.layout,
            gpus_per_node=self.hardware.gpus_per_node,
            own_slots=self.config.launch.engine_slots,
            read_buckets=self.hardware.kind == "cpu",
        )

    @property
    def resting_bytes(self) -> int:
        """Off-loaded optimizer state of the fullest rank in host memory, of policy and critic."""
        rank = self.stages[self.fullest_stage]
        return rank.policy.offloaded + rank.critic.offloaded

    @cached_property
    def step_time(self) -> StepTime:
        """Seconds of a step on this hardware, by part."""
        return StepTime(self, self.hardware)

    @property
    def generation(self) -> Generation:
        """One engine's share of a step."""
        return self.step_time.generation

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase of a step."""
        return self.step_time.seconds

    @cached_property
    def seconds_range(self) -> dict[str, tuple[float, float]]:
        """Seconds of each phase with all assumptions at their best, and at their worst."""
        best, worst = (StepTime(self, self.hardware.at(end)).seconds for end in ("best", "worst"))
        return {phase: (seconds, worst[phase]) for phase, seconds in best.items()}


class StepTime:
    """Seconds of a step of an estimate on hardware of some speed."""

    def __init__(self, estimate: Estimate, hardware: Hardware) -> None:
        """Take the amounts of the estimate, and the speeds of the hardware."""
        self.estimate, self.hardware = estimate, hardware

    @cached_property
    def generation(self) -> Generation:
        """One engine's share of the step."""
        of = self.estimate
        return generation(of.facts, self.hardware, of.work, of.config, of.engine)

    @cached_property
    def training(self) -> TrainingTime:
        """Seconds of the trainer's phases."""
        of, training = self.estimate, self.estimate.config.training
        replicas = of.layout.dp * of.layout.cp
        trained = of.stages[of.fullest_stage].policy.trained
        sent = trained * (GRADIENT_BYTES + DTYPE_BYTES[training.dtype]) * (replicas - 1) / replicas
        return training_time(
            of.facts,
            self.hardware,
            of.work,
            of.layout,
            training=training,
            num_microbatches=of.microbatches[1],
            exchanged_bytes=sent,
            resting_bytes=of.resting_bytes // (1 if of.config.critic is None else 2),
        )

    @cached_property
    def phases(self) -> dict[str, list[Part]]:
        """Parts of each phase, with the assumptions that they rest on."""
        of, hardware = self.estimate, self.hardware
        sync = max(of.traffic.bound_seconds(hardware).values()) / hardware.link_efficiency
        moved = (of.slot.weights + of.slot.optimizer + of.slot.critic) * of.offloads
        return {
            "generate": self.generation.parts,
            "log_probs": self.training.log_probs,
            "update": self.training.update,
            "gradient_exchange": self.training.gradient_exchange,
            "sync": [Part("bytes over links", sync, LINK)],
            "offload": [Part("bytes to the host and back", to_host_and_back(moved, hardware), LINK)],
        }

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {phase: total(parts) for phase, parts in self.phases.items()}
