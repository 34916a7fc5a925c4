"""The name tables against Megatron's models: every rank of several layouts, equal names and shapes.

One process builds each rank's model in turn: torch's fake process group gives Megatron a world of any size,
and a model's construction moves no data between ranks.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrl.config.sections.training import TrainingSection
from mrl.models.hf_config import language_model
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.megatron import layer_specs
from mrl.models.megatron.build import PackedModel, build_chunks
from mrl.models.tensors import LOCAL
from mrl.resharding.planner import trainer_manifests
from mrl.resharding.planner.manifest import RankManifest
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.integration


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return language_model(tiny_config(model_type, **changes).to_dict())


QWEN3 = config_of("qwen3", tie_word_embeddings=True)
QWEN3_MOE = config_of("qwen3_moe", mlp_only_layers=[1])
DELTA_NETS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
LAYOUTS = [
    (QWEN3, Layout()),
    (QWEN3, Layout(tp=4, pp=2)),  # tp above the query groups, tied copy on the last stage
    (QWEN3_MOE, Layout(tp=2, pp=2, ep=2, vpp=2)),
    (QWEN3_MOE, Layout(tp=4, ep=2, etp=2, dp=2)),
    (QWEN3_MOE, Layout(tp=1, ep=4, dp=4)),
    (config_of("mixtral"), Layout(tp=2, ep=2, pp=2)),
    (config_of("deepseek_v3"), Layout(tp=2, pp=2, ep=4, dp=2)),
    (config_of("moonlight"), Layout(tp=2, ep=2)),  # queries are not compressed
    (config_of("minimax_m2"), Layout(tp=4, ep=2, etp=2)),  # tp above the key heads
    (config_of("gpt_oss"), Layout(tp=2, pp=2, ep=2)),
    (config_of("glm4_moe"), Layout(tp=4, pp=2, ep=2)),
    (config_of("phi3"), Layout(tp=4, pp=2)),
    (config_of("qwen2"), Layout(tp=4, pp=2)),
    (config_of("qwen2_moe"), Layout(tp=2, pp=2, ep=2)),
    (config_of("qwen3_next", **DELTA_NETS), Layout(tp=4, pp=2, ep=2)),
    (config_of("qwen3_5_moe", **DELTA_NETS), Layout(tp=4, pp=2, ep=2)),
]


def build_rank(hf: dict, layout: Layout, coordinates: RankCoordinates) -> list[PackedModel]:
    """Build the model chunks of one rank, like the worker."""
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=coordinates.rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp, create_gloo_process_groups=False,
    )  # fmt: skip
    try:
        assert (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        ) == (coordinates.tp, coordinates.pp, coordinates.ep, coordinates.etp, coordinates.edp)
        training = TrainingSection(dtype="float32")
        return build_chunks(hf, training, layout, max_length=64, device=torch.device("cpu")).models
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def cpu_construction(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    from megatron.core.transformer import multi_latent_attention

    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self)


def described(chunks: list[dict[str, torch.Tensor]]) -> dict[tuple[int, str], tuple[tuple[int, ...], str]]:
    """Return (chunk, name) -> shape and dtype of a live model's parameters."""
    live = ((number, *pair) for number, chunk in enumerate(chunks) for pair in chunk.items())
    return {(c, n.removeprefix("module.")): (tuple(w.shape), str(w.dtype)[6:]) for c, n, w in live}


def expected(manifest: RankManifest) -> dict[tuple[int, str], tuple[tuple[int, ...], str]]:
    return {(t.chunk, t.name): (t.shape, t.dtype) for t in manifest.tensors}


@pytest.mark.parametrize(("hf", "layout"), LAYOUTS)
def test_names_and_shapes_equal_megatrons(hf, layout):
    tables = trainer_manifests.trainer_rank_manifests(hf, layout, dtype="float32")
    for coordinates in layout.all_coordinates():
        chunks = [model.weights() for model in build_rank(hf, layout, coordinates)]
        assert described(chunks) == expected(tables[coordinates.rank])


class LocalSpecExperts(SequentialMLP):
    def __init__(self, num_local_experts, config, *, pg_collection, name=None):
        spec = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")
        experts = spec.submodules.mlp.keywords["submodules"].experts
        super().__init__(num_local_experts, config, experts.keywords["submodules"], pg_collection, name=name)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, ep=2), Layout(tp=4, ep=2, etp=2, dp=2)])
def test_sequential_experts_have_megatrons_names_too(layout, monkeypatch):
    """The tables also match models that Megatron's local spec builds."""
    monkeypatch.setattr(layer_specs, "GroupedExperts", LocalSpecExperts)
    tables = trainer_manifests.trainer_rank_manifests(QWEN3_MOE, layout, dtype="float32", spec=LOCAL)
    for coordinates in layout.all_coordinates():
        chunks = [model.weights() for model in build_rank(QWEN3_MOE, layout, coordinates)]
        assert described(chunks) == expected(tables[coordinates.rank])
