"""Gradients summed over replicas during the backward pass equal those summed after it; order of events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from mrl.algorithms.objective import cross_entropy
from mrl.algorithms.tokens import NotFiniteError
from mrl.config.sections.lora import LoraSection
from mrl.config.sections.training import LayoutSection, OptimizerSection, TrainingSection
from mrl.samples import TrainBatch
from mrl.training.pass_options import PassOptions
from mrl.training.trained_model import TrainedModel
from tests.mrl.training.layouts import OneRank, name_of
from tests.mrl.training.scenarios import TEMPERATURE, shard_of, worker
from tests.ranks import run_ranks
from tests.tiny_models import random_batch

SMALL = 5000
"""Parameters in a bucket, so that tiny models have several."""
LORA = LoraSection(rank=4, alpha=8.0, targets=("attention", "routed_experts"))
PLAIN_STEP = OptimizerSection(lr=1e-3, clip_grad=0.0)
"""Without clipping: the norm, which is summed over other shards, changes nothing."""

LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3_moe", {"dp": 2, "ep": 2}, {}),
    ("qwen3_moe", {"tp": 2, "dp": 2}, {"recompute": "full"}),
    ("qwen3_moe", {"pp": 2, "vpp": 2, "dp": 2}, {}),
    ("qwen3_moe", {"dp": 2}, {"lora": LORA}),
]
LONG_LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3_moe", {"cp": 2}, {}),
    ("qwen3_moe", {"dp": 3}, {}),  # a sum in another order
    ("qwen3_moe", {"dp": 2, "ep": 2}, {"recompute": "selective", "dtype": "bfloat16"}),
    ("qwen3_moe", {"pp": 2, "vpp": 2, "dp": 2}, {"lora": LORA}),
    ("llama_tied", {"pp": 2, "dp": 2}, {}),  # one parameter on two stages
    ("deepseek_v3", {"dp": 2, "ep": 2}, {"recompute": "selective"}),
    ("gpt_oss", {"dp": 2, "ep": 2}, {}),
    ("qwen3_5_moe", {"tp": 2, "dp": 2}, {}),
]
"""Each kind of layer and each kind of parallelism once."""


def name(value: Any) -> str:
    if isinstance(value, str) or not all(isinstance(size, int) for size in value.values()):
        return str(value) if isinstance(value, str) else "-".join(value)
    return name_of(value)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_LAYOUTS)],
    ids=name,
)
def test_the_sums_are_the_same(family, layout, changes, one_rank_of) -> None:
    check(one_rank_of.of(family)[0], layout, changes)


@pytest.mark.integration
@pytest.mark.parametrize(
    "layout", [{"dp": 2}, pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow)], ids=name_of
)
def test_a_critic_sums_the_same(layout: dict[str, int], one_rank_of: OneRank) -> None:
    check(one_rank_of.of("qwen3_moe")[0], layout, {"has_value_head": True})


def check(folder: Path, layout: dict[str, int], changes: dict[str, Any]) -> None:
    """Compare, and check that rank 0, of the first stage, had several buckets."""
    world = LayoutSection(**layout).world_size
    results = run_ranks(compare, world, str(folder), layout, changes)
    assert results[0] > 1, results


def compare(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], changes: dict[str, Any]
) -> int:
    """Compare updates with several buckets to updates with one sum at the end; return the number of buckets.

    With two replicas gradients and parameters are bitwise equal: the order of two summands does not matter.
    With more, gloo begins each element's sum at another one. Then the rate is 0, so that parameters stay
    equal, and gradients differ at most by reordered rounding (`rounding_of`), which Adam would amplify.
    The second replica has some dummies, then only dummies, then refuses an update; the last is as the first.
    """
    has_value_head = changes.get("has_value_head", False)
    at = worker(
        rank, world, port, folder, layout,
        optimizer=PLAIN_STEP, overlap_grad_reduce=True, bucket_size=SMALL, **changes,
    )  # fmt: skip
    training = at.training.model_copy(update={"overlap_grad_reduce": False, "bucket_size": None})
    late = TrainedModel(
        at.model, training, layout=at.layout, place=at.place, device=at.device, has_value_head=has_value_head
    )
    late.load_hf(folder)
    left, largest = noting_what_is_left(at.policy._reduction), noting_largest_gradients(late)
    batch = random_batch(10, seed=1)
    _, shard = shard_of(batch, at)
    lonely = batch if at.place.dp == 0 else batch.select(np.zeros(0, np.int64))
    plain = squared_values if has_value_head else cross_entropy
    refuses = refused if at.place.dp == 1 else plain
    exact = max(at.layout.dp * at.layout.cp, at.layout.edp) == 2
    updates = ((shard, plain, 0.0), (lonely, plain, 0.0), (shard, refuses, 1.0), (shard, plain, 0.0))
    for share, loss, skipped in updates:
        outcomes = [accumulate(model, share, loss) for model in (at.policy, late)]
        assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-6, abs=0, nan_ok=True), outcomes
        require_equal(gradients(at.policy), gradients(late), {} if exact else rounding_of(largest))
        steps = [model.step(lr=None if exact else 0.0) for model in (at.policy, late)]
        assert [step["skipped"] for step in steps] == [skipped if at.layout.dp > 1 else 0.0] * 2
        require_equal(parameters(at.policy), parameters(late))
        at.policy.offload()  # buckets are views of what goes and comes back
        at.policy.reload()
    assert left == [0] * 4  # dummies, adapters and a refused loss bring all gradients too
    at.close()
    return sum(len(model.bucket_groups + model.expert_parallel_bucket_groups) for model in at.policy._models)


def noting_what_is_left(reduction: Any) -> list[int]:
    """Return a list that grows with every update by the sums that start after its backward passes alone."""
    left, finish = [], reduction.finish

    def noted() -> None:
        left.append(len(reduction._groups) - reduction._started)
        finish()

    reduction.finish = noted
    return left


def noting_largest_gradients(model: TrainedModel) -> dict[str, float]:
    """Return a dict that each update fills with the rank's largest gradient per parameter, before the sum."""
    largest: dict[str, float] = {}
    config = model.chunks.config
    sum_gradients: Any = config.finalize_model_grads_func

    def noted(*args: Any, **kwargs: Any) -> None:
        for chunk, wrapped in enumerate(model._models):
            for name, parameter in wrapped.module.named_parameters():
                if hasattr(parameter, "main_grad"):
                    largest[f"{chunk} {name}"] = float(parameter.main_grad.nan_to_num().abs().max())
        sum_gradients(*args, **kwargs)

    config.finalize_model_grads_func = noted
    return largest


def rounding_of(largest: dict[str, float]) -> dict[str, float]:
    """Return by how much two sums over ranks, in different orders, can differ in an element.

    A sum of n numbers in any order is off by at most (n - 1) u sum |x_i|, u = eps / 2 (Higham, Accuracy and
    Stability of Numerical Algorithms, 4.2); two differ by at most (n - 1) eps sum |x_i|, for n ranks at most.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, largest)
    eps = torch.finfo(torch.float32).eps
    return {key: len(ranks) * eps * sum(rank.get(key, 0.0) for rank in ranks) for key in largest}


def accumulate(model: TrainedModel, batch: TrainBatch, objective: Any) -> dict[str, float]:
    return model.accumulate(batch, objective, {"num_tokens": 100}, PassOptions(temperature=TEMPERATURE))[0]


def refused(**fields: Any) -> Any:
    raise NotFiniteError("advantages", "made up")


def squared_values(*, values: Tensor, denominators: dict[str, float], **_: Any) -> Any:
    loss = (values - 1.0).square().sum() / denominators["num_tokens"]
    return loss, {}


def parameters(model: TrainedModel) -> dict[str, Tensor]:
    return {f"{local.chunk} {local.name}": tensor for local, tensor, *_ in model.local_tensors()}


def gradients(model: TrainedModel) -> dict[str, Tensor]:
    """Return the summed gradient of each trained parameter, whole: replicas share every bucket."""
    summed = {}
    for chunk, wrapped in enumerate(model._models):
        names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                whole = torch.empty_like(bucket.grad_data)
                shard = bucket.grad_data.chunk(size)[rank]
                dist.all_gather_single(whole, shard, group=buffer.data_parallel_group)
                for parameter, (start, end) in bucket.param_to_index.items():
                    summed[f"{chunk} {names[parameter]}"] = whole[start:end]
    return summed


def require_equal(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], bounds: Mapping[str, float] | None = None
) -> None:
    """Check that tensors are bitwise equal, or differ by at most the bound under their name."""
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        bound = bounds[key] if bounds else 0.0
        torch.testing.assert_close(
            tensor,
            theirs[key],
            rtol=0,
            atol=bound,
            equal_nan=True,
            msg=lambda text, key=key: f"{key}: {text}",
        )


@pytest.mark.integration
def test_sums_start_before_the_backward_pass_is_over(one_rank_of: OneRank) -> None:
    """Later layers' sums start before the first layer's gradients; without overlap, after all of them.

    No wait comes before the last gradient, and the order is the same on the rank that runs a dummy last.
    """
    folder = str(one_rank_of.of("qwen3_moe")[0])
    early, late = (run_ranks(order_of_events, 2, folder, {"dp": 2}, changes) for changes in (
        {"overlap_grad_reduce": True, "bucket_size": SMALL}, {"overlap_grad_reduce": False},
    ))  # fmt: skip
    for log in early:
        first_layer = [i for i, event in enumerate(log) if event.startswith("gradient decoder.layers.0.")]
        starts = [i for i, event in enumerate(log) if event.startswith("start")]
        last_gradient = max(i for i, event in enumerate(log) if event.startswith("gradient"))
        assert len(starts) > 4 and log.count("microbatch") >= 2, log
        assert starts[0] > len(log) - 1 - log[::-1].index("microbatch"), "a sum before the last microbatch"
        before = [start for start in starts if start < min(i for i in first_layer if i > starts[0])]
        assert len(before) > 2, log
        assert min(i for i, event in enumerate(log) if event == "wait") > last_gradient
    assert sums_of(early[0]) == sums_of(early[1])
    for log in late:
        last_gradient = max(i for i, event in enumerate(log) if event.startswith("gradient"))
        assert min(i for i, event in enumerate(log) if event.startswith("start")) > last_gradient


def sums_of(events: list[str]) -> list[str]:
    return [event for event in events if event.startswith("start")]


def order_of_events(
    rank: int, world: int, port: int, folder: str, layout: dict[str, int], changes: dict[str, Any]
) -> list[str]:
    """Return the events of the second update: microbatches, gradients, starts of sums, and waits for them."""
    at = worker(rank, world, port, folder, layout, **changes)
    (model,) = at.policy._models
    _, shard = shard_of(random_batch(10, seed=1), at)
    accumulate(at.policy, shard, cross_entropy)
    events: list[str] = []

    def noting(event: str, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return call(*args, **kwargs)

        return noted

    model.module.register_forward_pre_hook(lambda *_: events.append("microbatch"))
    for parameter_name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(noting(f"gradient {parameter_name}", lambda _: None))
    for number, group in enumerate(model.bucket_groups + model.expert_parallel_bucket_groups):
        group.start_grad_sync = noting(f"start {number}", group.start_grad_sync)
        group.finish_grad_sync = noting("wait", group.finish_grad_sync)
    accumulate(at.policy, shard, cross_entropy)
    at.close()
    return events


@pytest.mark.integration
def test_a_microbatch_without_gradients_delays_the_sums_alone(one_rank_of: OneRank) -> None:
    """One replica's last microbatch has no gradient: its sums start last, in the order of all."""
    run_ranks(one_sided, 2, str(one_rank_of.of("qwen3")[0]))


def one_sided(rank: int, world: int, port: int, folder: str) -> None:
    at = worker(rank, world, port, folder, {"dp": 2}, overlap_grad_reduce=True, bucket_size=SMALL)
    batch = random_batch(4, seed=1)
    accumulate(at.policy, batch, cross_entropy)
    both = {key: gradient.clone() for key, gradient in gradients(at.policy).items()}
    accumulate(at.policy, batch, cross_entropy if rank == 0 else constant)
    require_equal({key: 2 * gradient for key, gradient in gradients(at.policy).items()}, both)
    reduction: Any = at.policy._reduction  # every gradient had come on rank 0, none on rank 1
    if rank == 1:
        return
    with pytest.raises(RuntimeError, match="twice in one micro-batch"):
        reduction.take(at.policy.chunks.models[0].head_weight())
    at.close()


def constant(**_: Any) -> Any:
    """Return a loss that does not depend on the model."""
    return torch.zeros((), requires_grad=True), {}


@pytest.mark.integration
def test_parameters_are_gathered_once_while_the_experts_are_stepped(one_rank_of: OneRank) -> None:
    for events, buckets in run_ranks(gathers, 2, str(one_rank_of.of("qwen3_moe")[0])):
        assert events.count("gather") == buckets > 4, events
        assert "gather" in events[events.index("step") : len(events) - 1 - events[::-1].index("step")], events


def gathers(rank: int, world: int, port: int, folder: str) -> tuple[list[str], int]:
    """Return an update's optimizer steps and gathers, and the number of buckets; compare parameters."""
    at = worker(rank, world, port, folder, {"dp": 2}, overlap_grad_reduce=True, bucket_size=SMALL)
    events: list[str] = []
    gather, parts = dist.all_gather_single, at.policy.optimizer.parts()

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("gather")
        return gather(*args, **kwargs)

    def stepping(step: Any) -> Any:
        def stepped() -> Any:
            events.append("step")
            return step()

        return stepped

    for part in parts:
        part.step_with_ready_grads = stepping(part.step_with_ready_grads)
    accumulate(at.policy, random_batch(4, seed=1), cross_entropy)
    dist.all_gather_single = noted
    at.policy.step()
    dist.all_gather_single = gather
    for tensor in parameters(at.policy).values():
        other = tensor.detach().clone()
        dist.broadcast(other, src=0)
        assert torch.equal(tensor, other)
    at.close()
    return events, sum(len(buffer.buckets) for part in parts for buffer in part.buffers)


@pytest.mark.parametrize(
    ("changes", "bucket"),
    [
        ({}, None),
        ({"layout": {"dp": 2}}, 40_000_000),
        ({"layout": {"cp": 2}}, 40_000_000),
        ({"layout": {"tp": 2}}, 40_000_000),  # experts have two replicas
        ({"layout": {"tp": 2, "ep": 2}}, None),
        ({"layout": {"dp": 64}}, 64_000_000),
        ({"layout": {"dp": 2}, "bucket_size": 7}, 7),
        ({"layout": {"dp": 2}, "overlap_grad_reduce": False}, None),
        ({"overlap_grad_reduce": True}, 40_000_000),
    ],
)  # fmt: skip
def test_auto_is_on_where_there_are_replicas(changes: dict[str, Any], bucket: int | None) -> None:
    assert TrainingSection.model_validate(changes).summed_bucket() == bucket


def test_a_bucket_size_without_overlap_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"bucket_size = 7 .* remove bucket_size"):
        TrainingSection(overlap_grad_reduce=False, bucket_size=7)
