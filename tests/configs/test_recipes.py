"""Every recipe and its layouts resolve, survive a round trip, and fit the hardware in their name."""

import os
from pathlib import Path

import pytest

from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import capacity_report
from mrl.config.load import dump, load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.launch.commands import check, engines
from mrl.rollout.engine_process import slots_per_node
from tests.support.recipes import NOT_FOR_NODES, RECIPES, cases, files_of


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a cluster with GPUs and published models that consist of their config.json only."""
    monkeypatch.setenv("RAY_ADDRESS", "a cluster with GPUs")
    monkeypatch.setattr(check, "_check_weights", lambda folder, policy, drafts=False: None)


def train_refuses(config: Config) -> bool:
    try:
        check.check_policy(config)
    except ConfigError:
        return True
    return False


def with_folder(files: tuple[Path, ...], *words: str) -> Config:
    """Return the recipe on nodes of eight slots, with an existing model folder."""
    folder = CONFIGS / "models" / Path(load(files).model.path).name
    return load(files, [f"model.path={folder}", "launch.slots_per_node=8", *words])


def test_every_recipe_is_among_the_cases() -> None:
    """Every file of configs/, also a future one, is a recipe for GPU nodes or listed as an exception."""
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == RECIPES.keys() | NOT_FOR_NODES


@pytest.mark.parametrize(
    ("files", "nodes", "hardware"), cases(), ids=lambda value: getattr(value, "stem", None)
)
def test_recipe_fits_its_hardware_and_can_be_trained(files, nodes, hardware, published) -> None:
    config = with_folder(files)
    assert not train_refuses(config)
    # as Ray may number nodes
    numbers = [3 + 2 * (rank // 8) for rank in range(config.training.layout.world_size)]
    is_record = files[-1].parent.name == "records"  # others' engines, of tp over nodes
    assert is_record or all(len(share) == 1 for share in slots_per_node(config, numbers))
    report = capacity_report(config, load_hardware(hardware))
    estimate = report.estimate
    assert report.advice.errors == []
    assert report.fits
    assert not any(" free: fragmentation" in line for line in report.advice.warnings)
    assert max(wait.share for wait in estimate.waits) < 0.5
    assert report.num_nodes == nodes
    assert estimate.layout.world_size == 8 * nodes
    assert estimate.engine.kv_cache_tokens // config.model.max_length >= 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_plan_says_that_a_recipe_fits_hardware_that_it_does_not(recipe: str) -> None:
    """The smaller memory size is too small for the largest models, in float8 too."""
    plan = capacity_report(load(files_of(recipe)), load_hardware("8x80gb"))
    assert plan.fits == (recipe not in ("deepseek_v3", "kimi_k2"))


@pytest.mark.parametrize("recipe", ["qwen3_235b_a22b_131k", "glm_4_5_air_131k"])
def test_long_episodes_fit_by_cp_recompute_and_a_cache_in_float8(recipe: str) -> None:
    """Less recompute does not fit, less cp takes more memory, and a cache in bfloat16 has half the tokens."""
    whole, hardware = load(files_of(recipe)), load_hardware("8x80gb")
    assert whole.model.max_length == 131072 and whole.stream.max_staleness == 1
    assert whole.data.max_prompt_tokens + whole.rollout.max_response_tokens == 131072

    def worst(*words: str) -> float:
        plan = Estimate(load(files_of(recipe), words), hardware)
        assert plan.unmet == []
        return min(event.free for event in plan.timeline if event.name == "update") / 1e9

    layout = whole.training.layout
    assert worst() > 25
    assert worst("training.layout.cp=1", f"training.layout.dp={layout.dp * layout.cp}") < worst() - 10
    assert worst("training.recompute=selective") < 0
    caches = [
        Estimate(load(files_of(recipe), [f"rollout.engine_args={{kv_cache_dtype: {kind}}}"]), hardware).engine
        for kind in ("fp8", "bfloat16")
    ]
    assert caches[0].kv_cache_tokens == pytest.approx(2 * caches[1].kv_cache_tokens, rel=1e-5)


LARGER_GLM = ("model.path=weights/GLM-4.5", "training.layout={tp: 4, pp: 8, dp: 4, ep: 8}")
OVER_TWO_NODES = (
    "training.layout.dp=8",
    "rollout={tp: 1, dp: 16, quantization: fp8_block, max_num_seqs: 32, max_num_batched_tokens: 2048}",
)


@pytest.mark.parametrize(
    ("words", "hardware", "nodes", "fits"),
    [
        (LARGER_GLM, "8x141gb", 16, True),
        (LARGER_GLM, "8x80gb", 16, False),
        ((*LARGER_GLM, "training.layout.dp=8"), "8x80gb", 32, False),
        ((*LARGER_GLM, *OVER_TWO_NODES), "8x80gb", 32, True),
    ],
    ids=["141 GB", "80 GB", "80 GB, twice the nodes", "80 GB, engines of two nodes"],
)
def test_the_larger_glm_fits_where_its_recipe_says(words, hardware, nodes, fits) -> None:
    """configs/glm_4_5_air.yaml names the extra needs of 355B."""
    plan = capacity_report(load(files_of("glm_4_5_air"), words), load_hardware(hardware))
    assert plan.num_nodes == nodes
    assert plan.fits == fits, plan.advice.errors


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_whose_engines_span_nodes_says_so(recipe: str) -> None:
    """The comments at its head say so, with the setting."""
    nodes = load(files_of(recipe)).rollout.ranks // 8
    head = (CONFIGS / f"{recipe}.yaml").read_text().partition("\nrun:")[0]
    assert nodes in (0, 1) or (f"(dp {8 * nodes}" in head and "attention" in head), nodes


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ("deepseek_v3", "rollout.tp=16"),
        ("qwen3_30b_a3b", "rollout.tp=64"),
        ("qwen3_30b_a3b", "training.layout.tp=128"),
        ("qwen3_30b_a3b", "data.max_prompt_tokens=50000000"),
    ],
)
def test_what_train_refuses_does_not_fit_by_the_plan(recipe, word, published) -> None:
    config = with_folder((CONFIGS / f"{recipe}.yaml",), "training.layout.dp=16", word)
    assert train_refuses(config)
    assert not capacity_report(config, load_hardware("8x141gb")).fits


def test_a_plan_knows_whose_layers_train_attention_sinks() -> None:
    """The local spec does, also by default; Transformer Engine's is refused before anything starts."""
    recipe, hardware = [CONFIGS / "gpt_oss_120b.yaml"], load_hardware("8x80gb")
    local, alone, refused = (
        capacity_report(load(recipe, [f"training.spec={spec}"]), hardware)
        for spec in ("local", "auto", "transformer_engine")
    )
    assert alone.estimate.seconds == local.estimate.seconds
    assert alone.estimate.timeline == local.estimate.timeline
    assert not refused.fits and "attention sinks" in refused.advice.errors[0]


@pytest.mark.parametrize(
    ("recipe", "gpus", "message"),
    [
        ("qwen3_30b_a3b", "[7]", "the layout needs 8 GPUs, but reward.engines leaves 7"),
        ("qwen3_30b_a3b", "[8]", "names the GPUs [8], but this machine has 8"),
        ("qwen3_30b_a3b", "[]", "gpus is empty"),
        ("qwen3_235b_a22b", "[7]", "its GPUs belong to Ray"),
    ],
)
def test_gpus_of_reward_engines_are_none_of_the_layouts_by_the_plan_too(
    recipe: str, gpus: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = f"reward={{kind: llm, engine: j, engines: {{j: {{model: /judge, gpus: {gpus}}}}}}}"
    config = load(files_of(recipe), [word])
    report = capacity_report(config, load_hardware("8x80gb"))
    assert not report.fits
    monkeypatch.setattr(engines, "own_gpus", lambda: 8)
    if recipe == "qwen3_235b_a22b":
        monkeypatch.setenv("RAY_ADDRESS", "a cluster with GPUs")
    with pytest.raises(ConfigError) as refused:
        engines.check_engines(config)
    (line,) = report.advice.errors
    assert message in line and line == str(refused.value).splitlines()[-1]


def test_a_reward_engine_on_slots_is_counted_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event of the slot includes half of the judge's weights, its cache and vLLM's process."""
    judge = (
        "model: weights/Qwen3-30B-A3B, tp: 2, gpus: [6, 7], kv_cache_bytes: 1000000000, shares_slots: true"
    )
    word = f"reward={{kind: llm, engine: j, engines: {{j: {{{judge}}}}}}}"
    alone, hardware = load(files_of("qwen3_30b_a3b")), load_hardware("8x80gb")
    shared = load(files_of("qwen3_30b_a3b"), [word])
    assert Estimate(shared, hardware).unmet == Estimate(alone, hardware).unmet == []
    events = zip(Estimate(alone, hardware).timeline, Estimate(shared, hardware).timeline, strict=True)
    extra = {after.total - before.total for before, after in events}
    assert extra == {30_532_122_624 + 1_000_000_000 + hardware.engine_process_bytes}
    monkeypatch.setattr(engines, "own_gpus", lambda: 8)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert engines._gpu_faults(shared) == []
    with engines.without_gpus_of(shared.reward):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
    twice = load(files_of("qwen3_30b_a3b"), [word.replace("[6, 7]", "[6, 8]")])
    assert "names the GPUs [8]" in Estimate(twice, hardware).unmet[0]


@pytest.mark.parametrize(("files", "nodes", "hardware"), cases())
def test_a_resolved_recipe_reads_back_the_same(files, nodes, hardware, tmp_path) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(load(files)))
    assert dump(load([resolved])) == resolved.read_text()
