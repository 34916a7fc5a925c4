"""Estimate the host memory of one node over a step: what its trainers keep there, and what saving needs in
addition.

Off-loaded trainer state occupies host memory for the whole run (page-locked buffers are allocated once), as
do the reference policy and the teachers. Data that a step moves between processes is in the node's object
store; groups that a stream keeps until their step are in the driver's memory.
"""

from __future__ import annotations

from mrl.capacity.memory_timeline import Event
from mrl.capacity.step_time import Work
from mrl.config.root import Config
from mrl.models.facts import ModelSize
from mrl.pool.quota import max_buffer_bytes

TOKEN_BYTES = 4 + 1 + 8 * 4
"""Bytes per token of a distributed batch: tokens, mask, and at most eight arrays of samples.TrainBatch."""
RESULT_BYTES = 3 * 4
"""Bytes per token that a pass returns: log-probs, entropies, router margins."""


def object_store_bytes(config: Config, facts: ModelSize, work: Work, *, slots_per_node: int) -> int:
    """Return the most bytes that one step of mean samples has in Ray's object store of the driver's node.

    That is a batch and the results of its passes; with routing.replay = engine also the routes of the node's
    engines, and those that its trainer ranks fetch.
    """
    layout, batch = config.training.layout.sizes(), work.tokens * (TOKEN_BYTES + RESULT_BYTES)
    if config.routing.replay != "engine":
        return int(batch)
    numbers = facts.moe_layers * facts.top_k
    waiting = 1 + (config.stream.max_staleness if config.loop.schedule == "stream" else 0)
    generated = waiting * min(1.0, slots_per_node / config.num_slots)
    fetched = min(1.0, slots_per_node / (layout.tp * layout.cp * layout.dp))
    return int(batch + work.tokens * (generated + fetched) * numbers * (1 if facts.num_experts <= 256 else 2))


def rollout_buffer_bytes(config: Config) -> int:
    """Return the most bytes of judged groups in the driver's memory until their step."""
    return max_buffer_bytes(config) if config.loop.schedule == "stream" else 0


def num_earlier_weights(config: Config) -> int:
    """Return how many other weights the host keeps: the reference's, and those under adapters, which also
    serve as the reference unless that is another folder."""
    has_adapters = config.training.lora is not None
    if has_adapters and config.model.reference_path is None:
        return 1
    return has_adapters + config.algorithm.needs_reference


def host_moments(
    *,
    memory: int,
    store: int,
    pool: int,
    offloaded: int,
    reference: int,
    teachers: int,
    saving: int,
    export: int,
    new_weights: int,
    with_engines: bool,
) -> list[Event]:
    """Return the moments of highest use, in bytes of the driver's node and of one with engines alone.

    Args:
        new_weights: Bytes that the engines of a node take while they generate.
        with_engines: These are on the driver's node.
        saving: Additional bytes of a checkpoint, 0 if none is saved.
        export: Bytes of the process that exports the last one during the run, 0 without.
    """
    kept = {"off-loaded": offloaded, "reference": reference, "teachers": teachers, "export": export}
    kept |= {"object store": store, "pool": pool}
    if with_engines:
        kept |= {"new weights": new_weights}
    moments = [("engines serve", kept), ("save", kept | {"copied state": saving})]
    if not with_engines and new_weights:
        moments.append(("node of engines", {"new weights": new_weights}))
    return [_moment(name, parts, memory) for name, parts in moments if name != "save" or saving]


def _moment(name: str, parts: dict[str, int], memory: int) -> Event:
    filled = {part: size for part, size in parts.items() if size}
    return Event(name, filled, memory - sum(filled.values()))
