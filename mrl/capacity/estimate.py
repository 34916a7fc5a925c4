"""A configuration and its hardware to a report. Owns the order of the estimates; the formulas are in the files beside it."""

from __future__ import annotations

import dataclasses

from mrl.capacity import advice, fits, quantisation
from mrl.capacity.activations import Activations, activations, head_bytes
from mrl.capacity.hardware import Hardware
from mrl.capacity.memory_timeline import Moment, SlotMemory, moments
from mrl.capacity.model_facts import find_facts
from mrl.capacity.report import Report
from mrl.capacity.rollout_memory import EngineMemory, engine_memory, kv_cache_bytes
from mrl.capacity.step_time import Generation, generation, training_time
from mrl.capacity.step_workload import Work, microbatches, work_of
from mrl.capacity.traffic import Traffic, traffic
from mrl.capacity.training_memory import ELEMENT_BYTES, StageMemory, stage_memory
from mrl.config.root import Config
from mrl.config.sections.model import ModelSection
from mrl.models.facts import Facts
from mrl.models.layout import Layout


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is planned."""

    config: Config
    hardware: Hardware
    facts: Facts
    layout: Layout
    work: Work

    @property
    def sleeps(self) -> bool:
        return self.config.rollout.enable_sleep_mode and self.hardware.kind == "gpu"

    @property
    def offloads(self) -> bool:
        return self.config.training.offloads(gpus=self.hardware.kind == "gpu")


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The trainer's side; lists have one entry per pipeline stage."""

    stages: list[StageMemory]
    critic: list[StageMemory]
    """Of PPO's value model; empty without one. Its passes come after the policy's and need no more activations."""
    activations: list[Activations]
    microbatch_tokens: int
    num_microbatches: int

    def fullest(self) -> int:
        """The stage whose update needs most."""
        return max(range(len(self.stages)), key=lambda s: self.total(s))

    def total(self, stage: int) -> int:
        memory, kept = self.stages[stage], self.activations[stage]
        return (
            memory.weights
            + memory.gradients
            + memory.optimizer
            + self.critic_bytes(stage)
            + kept.kept
            + kept.working
        )

    def critic_bytes(self, stage: int) -> int:
        return sum(m.weights + m.gradients + m.optimizer for m in self.critic[stage : stage + 1])


def plan_report(config: Config, hardware: Hardware) -> Report:
    """Does `config` fit `hardware`, and what does a step cost? ConfigError where the model is unknown.

    What `mrl train` would refuse gives a report of its errors alone.
    """
    facts = find_facts(config.model)
    subject = Subject(config, hardware, facts, config.training.layout.sizes(), work_of(config, hardware))
    per_node = config.launch.slots_per_node or hardware.gpus_per_node
    nodes = fits.node_numbers(subject.layout.world_size, per_node)
    errors = fits.refusals(config, facts.hf, nodes, gpus=hardware.kind == "gpu")
    head = _head(subject)
    if errors:
        return Report(head | {"fits": False, "errors": errors, "warnings": [], "suggestions": []})
    return Report(head | _estimates(subject))


def _estimates(subject: Subject) -> dict:
    config, hardware, facts, layout = subject.config, subject.hardware, subject.facts, subject.layout
    training = _training(subject)
    engine = engine_memory(facts, config.rollout)
    cache, engine_working = kv_cache_bytes(facts, config.rollout, hardware, engine)
    slot = _slot(subject, training, engine, cache, engine_working)
    all_moments = moments(slot, hardware, sleeps=subject.sleeps, offloads=subject.offloads)
    moved = traffic(facts, config.rollout, layout, gpus_per_node=hardware.gpus_per_node)
    made = _generation(subject, engine, cache)
    told = _advice(subject, slot, all_moments, moved, cache, made)
    return {
        "fits": not told.errors,
        "training": _training_rows(training),
        "rollout": _rollout_rows(subject, engine, cache),
        "memory_timeline": [_moment_row(moment) for moment in all_moments],
        "sync": _sync_rows(moved, hardware),
        "step": _step_rows(subject, training, made, moved, slot),
        **dataclasses.asdict(told),
    }


def _training(subject: Subject) -> TrainingPlan:
    training = subject.config.training
    tokens, count = microbatches(subject.config, subject.work)
    stages = stage_memory(subject.facts, training)
    kept = [
        activations(
            subject.facts,
            training,
            subject.layout,
            stage=s,
            tokens=tokens,
            num_microbatches=count,
            fused=subject.hardware.kind == "gpu",
        )
        for s in range(subject.layout.pp)
    ]
    return TrainingPlan(stages, _critic(subject), kept, tokens, count)


def _critic(subject: Subject) -> list[StageMemory]:
    critic, model = subject.config.critic, subject.config.model
    if critic is None:
        return []
    own = ModelSection(path=critic.path, max_length=model.max_length) if critic.path else None
    facts = find_facts(own) if own else subject.facts
    return stage_memory(facts, subject.config.training, value_head=True)


def _slot(
    subject: Subject, training: TrainingPlan, engine: EngineMemory, cache: int, engine_working: int
) -> SlotMemory:
    stage = training.fullest()
    memory, kept = training.stages[stage], training.activations[stage]
    facts, tp = subject.facts, subject.config.rollout.tp
    expert = facts.parameters_routed // max(1, facts.num_layers) // tp
    table = facts.vocab * facts.hidden // tp
    element = ELEMENT_BYTES[subject.config.rollout.dtype]
    log_probs = head_bytes(
        facts, subject.config.training, subject.layout, training.microbatch_tokens, backward=False
    )
    return SlotMemory(
        weights=memory.weights,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        critic=training.critic_bytes(stage),
        activations=kept.kept,
        working=kept.working,
        log_prob_working=log_probs,
        engine_weights=engine.weights + engine.derived,
        engine_working=engine_working,
        kv_cache=cache,
        buckets=2 * subject.config.sync.bucket_bytes,
        staging=max(expert, table) * element,
    )


def _generation(subject: Subject, engine: EngineMemory, cache: int) -> Generation:
    config = subject.config
    return generation(
        subject.facts,
        subject.hardware,
        subject.work,
        engines=config.num_engines,
        tp=config.rollout.tp,
        max_num_seqs=config.rollout.max_num_seqs,
        cache_tokens=max(0, cache) // engine.kv_bytes_per_token,
        rank_weights=engine.weights,
        kv_bytes_per_token=engine.kv_bytes_per_token,
    )


def _advice(
    subject: Subject,
    slot: SlotMemory,
    all_moments: list[Moment],
    moved: Traffic,
    cache: int,
    made: Generation,
) -> advice.Advice:
    config, hardware, facts, layout = subject.config, subject.hardware, subject.facts, subject.layout
    errors = advice.memory_errors(all_moments, hardware)
    errors += advice.host_errors(
        slot, hardware, offloads=subject.offloads, with_reference=config.algorithm.needs_reference
    )
    if cache <= 0:
        errors.append(
            f"rollout.gpu_memory_utilization = {config.rollout.gpu_memory_utilization:g} of the device is less than the engine's weights: "
            "no KV cache is left; raise it or rollout.tp"
        )
    warnings = advice.layout_warnings(facts, layout, config.training, config.rollout, hardware)
    warnings += advice.traffic_warnings(moved) + advice.memory_warnings(all_moments, hardware)
    warnings += quantisation.warnings(config, facts, layout)
    samples = -(-subject.work.samples // config.num_engines)
    warnings += advice.cache_warnings(made.concurrent, samples, config.rollout)
    suggestions: list[str] = []
    for moment in [m for m in all_moments if m.free < 0][:1]:
        suggestions = advice.memory_suggestions(
            moment, config.training, layout, config.rollout, facts, hardware
        )
    return advice.Advice(errors, warnings, suggestions)


def _head(subject: Subject) -> dict:
    config, layout, hardware = subject.config, subject.layout, subject.hardware
    return {
        "model": config.model.path,
        "model_facts": subject.facts.origin,
        "parameters_total": subject.facts.parameters_total,
        "parameters_active": subject.facts.parameters_active,
        "hardware": hardware.model_dump(),
        "layout": dataclasses.asdict(layout),
        "world_size": layout.world_size,
        "nodes": -(-layout.world_size // hardware.gpus_per_node),
        "engines": config.num_engines,
        "rollout_tp": config.rollout.tp,
        "expert_parallel": config.rollout.expert_parallel,
        "quantization": config.rollout.quantization,
    }


def _training_rows(training: TrainingPlan) -> dict:
    def row(stage: int) -> dict:
        memory, kept = training.stages[stage], training.activations[stage]
        return {
            "parameters": memory.parameters,
            "weights_bytes": memory.weights,
            "gradients_bytes": memory.gradients,
            "optimizer_bytes": memory.optimizer,
            "critic_bytes": training.critic_bytes(stage),
            "activations_bytes": kept.kept,
            "working_bytes": kept.working,
            "microbatches_in_flight": kept.microbatches_in_flight,
            "total_bytes": training.total(stage),
        }

    return {
        "stages": [row(stage) for stage in range(len(training.stages))],
        "fullest_stage": training.fullest(),
        "microbatch_tokens": training.microbatch_tokens,
        "num_microbatches": training.num_microbatches,
    }


def _rollout_rows(subject: Subject, engine: EngineMemory, cache: int) -> dict:
    tokens = max(0, cache) // engine.kv_bytes_per_token
    return {
        "weights_bytes": engine.weights,
        "derived_bytes": engine.derived,
        "kv_cache_bytes": max(0, cache),
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "kv_cache_tokens": tokens,
        "longest_sequences": tokens // subject.config.model.max_length,
    }


def _moment_row(moment: Moment) -> dict:
    return {
        "moment": moment.name,
        "parts": moment.parts,
        "total_bytes": moment.total,
        "free_bytes": moment.free,
        "fits": moment.free >= 0,
    }


def _sync_rows(moved: Traffic, hardware: Hardware) -> dict:
    bounds = moved.bound_seconds(hardware)
    return {
        "need_bytes": sum(moved.need),
        "need_bytes_max": max(moved.need),
        "local_bytes": sum(moved.local),
        "between_slots_bytes": moved.between_slots,
        "node_bytes": sum(moved.node_in),
        "network_bytes": sum(moved.network_in),
        "node_in_bytes_max": max(moved.node_in),
        "network_in_bytes_max": max(moved.network_in),
        "node_out_bytes_max": max(moved.node_out),
        "network_out_bytes_max": max(moved.network_out),
        "off_rail_bytes": moved.off_rail,
        "bound_seconds": bounds,
        "seconds": max(bounds.values()) / hardware.link_efficiency,
    }


def _step_rows(
    subject: Subject, training: TrainingPlan, made: Generation, moved: Traffic, slot: SlotMemory
) -> dict:
    config, hardware, layout, work = subject.config, subject.hardware, subject.layout, subject.work
    replicas = layout.dp * layout.cp
    sent = (slot.gradients + slot.weights) * (replicas - 1) / replicas
    trained = training_time(
        subject.facts,
        hardware,
        work,
        world_size=layout.world_size,
        pp=layout.pp,
        vpp=layout.vpp,
        num_microbatches=training.num_microbatches,
        recompute=config.training.recompute,
        exchanged_bytes=sent,
        crosses_nodes=layout.tp * replicas > hardware.gpus_per_node,
    )
    bounds = moved.bound_seconds(hardware)
    offload = 0.0
    if subject.offloads:  # weights, optimizer state and critic to the host and back
        moved_bytes = 2 * (slot.weights + slot.optimizer + slot.critic)
        offload = moved_bytes / (hardware.host_bytes_per_second * hardware.link_efficiency)
    seconds = {
        "generate": made.seconds,
        "log_probs": trained.log_probs,
        "update": trained.update,
        "gradient_exchange": trained.gradient_exchange,
        "sync": max(bounds.values()) / hardware.link_efficiency,
        "offload": offload,
    }
    total = sum(seconds.values())
    return {
        "seconds": seconds | {"total": total},
        "tokens": work.tokens,
        "tokens_per_second_per_slot": work.tokens / total / layout.world_size,
        "concurrent_sequences": made.concurrent,
        "decode_steps": made.decode_steps,
        "pipeline_bubble": trained.bubble,
    }
