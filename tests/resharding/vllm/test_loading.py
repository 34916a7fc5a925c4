"""Freedoms of a model's own load_weights in a reload and under the trace; vLLM's reload, tiny modules."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor, TensorSlice
from mrl.resharding.transfer.slot_tables import LeasedTensor, tables_of
from mrl.resharding.vllm.modules import PlanLoader
from mrl.resharding.vllm.trace import traced_manifest
from tests.resharding.feeding import plan_of

pytestmark = pytest.mark.integration

CONFIG: Any = types.SimpleNamespace(hf_config=types.SimpleNamespace(), dtype=torch.float32)
TENSORS = {
    "first.weight": torch.randn(3, 4),
    "first.bias": torch.randn(3),
    "second.weight": torch.randn(2, 3),
}
CHECKPOINT = [CheckpointTensor(name, tuple(w.shape), "float32") for name, w in TENSORS.items()]


class Model(torch.nn.Module):
    """Two layers, the first with a bias, filled by their parameters' loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False)
        for parameter in self.parameters():
            self.prepare(parameter)
        record_metadata_for_reloading(self)

    def prepare(self, parameter: Any) -> None:
        parameter.weight_loader = default_weight_loader

    def fill(self, parameter: Any, tensor: torch.Tensor) -> None:
        parameter.weight_loader(parameter, tensor)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            self.fill(parameters[name], tensor)
            loaded.add(name)
        return loaded


class LoaderWithoutName(Model):
    """As in vLLM's MiniMax-M2, norm loaders are functools.partial, which has no __name__."""

    def prepare(self, parameter: Any) -> None:
        parameter.weight_loader = functools.partial(default_weight_loader)


class CopiesPastItsLoader(Model):
    """As in vLLM's gpt-oss, a copy fills experts unseen by a weight loader."""

    def fill(self, parameter: Any, tensor: torch.Tensor) -> None:
        if tensor.shape == (2, 3):
            parameter.data.copy_(tensor)
        else:
            super().fill(parameter, tensor)


class ZeroesWhatItCopies(Model):
    """As in vLLM's gpt-oss, second biases are zero on all tensor-parallel ranks but the first."""

    def fill(self, parameter: Any, tensor: torch.Tensor) -> None:
        super().fill(parameter, tensor.zero_() if tensor.shape == (3,) else tensor)


class Layer(torch.nn.Module):
    """A module whose tensors are made by a method of vLLM."""

    quant_method: UnquantizedEmbeddingMethod
    weight: torch.nn.Parameter


class Tied(Model):
    """Output layer and embedding share a weight, each in vLLM's form for the machine's products."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.method, self.embedding, self.head = UnquantizedEmbeddingMethod(), Layer(), Layer()
        for module in (self.embedding, self.head):
            module.quant_method = self.method
            loader = {"weight_loader": default_weight_loader}
            self.method.create_weights(module, 64, [128], 64, 128, torch.float32, **loader)
        record_metadata_for_reloading(self)
        self.embedding.weight.data.normal_()
        self.head.weight = self.embedding.weight
        for module in (self.embedding, self.head):
            self.method.process_weights_after_loading(module)


def reload(model: Model, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    """Run a session that brings every tensor whole out of a trainer rank's memory."""
    plan = plan_of(tensors, 1 << 20)
    part = plan.part(0)
    leased = [LeasedTensor(n, 0, "float32", w.numel()) for n, w in enumerate(tensors.values())]
    loader = PlanLoader(model, CONFIG, None)
    loader.start(tables_of(part, leased), None)
    sources, nothing = [w.reshape(-1) for w in tensors.values()], torch.empty(0, dtype=torch.uint8)
    for index in range(len(part.windows)):
        loader.apply(index, sources, nothing)
    loader.finish()


@pytest.mark.parametrize("kind", [Model, LoaderWithoutName])
def test_a_reload_brings_every_tensor(kind: type[Model]) -> None:
    model = kind()
    kept = model.second.weight
    reload(model)
    assert all(torch.equal(dict(model.named_parameters())[name], w) for name, w in TENSORS.items())
    assert model.second.weight is kept


def test_a_tied_output_layer_computes_with_what_a_reload_brought() -> None:
    """On CPU vLLM packs the output layer's weight, which a reload of the embedding alone misses."""
    model, hidden, weight = Tied(), torch.randn(2, 64), torch.randn(128, 64)
    reload(model, {"embedding.weight": weight})
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model.method.apply(model.head, hidden), hidden @ weight.T)


def test_a_copy_past_the_loader_is_an_error_by_name() -> None:
    with pytest.raises(WeightSyncError, match=r"1 modules whose tensors were copied past .* \['second'\]"):
        reload(CopiesPastItsLoader())


@pytest.mark.parametrize("kind", [Model, LoaderWithoutName, CopiesPastItsLoader])
def test_the_trace_sees_biases_and_changes_nothing(kind: type[Model]) -> None:
    model = kind()
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    manifest = traced_manifest(model, CHECKPOINT, rank=0)
    assert {t.name: t.pieces for t in manifest.tensors} == {
        t.name: (TensorSlice(t.name, (0,) * len(t.shape), t.shape, (0,) * len(t.shape)),) for t in CHECKPOINT
    }
    assert manifest.unplanned == ()
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


def test_a_loader_that_changes_what_it_copies_is_seen_by_the_trace() -> None:
    """Its copy alone looks like a box, and a plan would bring what the loader zeroes."""
    with pytest.raises(WeightSyncError, match=r"first\.bias is changed before it is copied"):
        traced_manifest(ZeroesWhatItCopies(), CHECKPOINT, rank=1)
