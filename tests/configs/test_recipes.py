"""Every recipe and every layout beside it resolves, survives a round trip, and fits the hardware in its name."""

import json
import time
from pathlib import Path

import pytest

from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import capacity_report
from mrl.capacity.requirements import engines_over_nodes
from mrl.config.load import dump, load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.launch.commands.check import check_policy
from mrl.models.families import family_of
from mrl.models.hf_config import language_model
from tests.support.recipes import RECIPES, cases


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model name -> a folder with its published config.json and an index of all its tensors, in one empty file."""
    found = {}
    for published in CONFIGS.glob("models/*/config.json"):
        folder = tmp_path_factory.mktemp("weights") / published.parent.name
        folder.mkdir()
        text = published.read_text()
        (folder / "config.json").write_text(text)
        hf = language_model(json.loads(text))
        names = [t.name for t in family_of(hf).checkpoint_tensors(hf)]
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "all.safetensors")})
        )
        (folder / "all.safetensors").touch()
        found[folder.name] = folder
    return found


def train_refuses(config: Config) -> bool:
    try:
        check_policy(config)
    except ConfigError:
        return True
    return False


def with_folder(files: tuple[Path, ...], folders: dict[str, Path], *words: str) -> Config:
    """The recipe on nodes of eight slots, its model's folder in the place of the one that nobody has here."""
    folder = folders[Path(load(files).model.path).name]
    return load(files, [f"model.path={folder}", "launch.slots_per_node=8", *words])


@pytest.mark.parametrize(
    ("files", "nodes", "hardware"), cases(), ids=lambda value: getattr(value, "stem", None)
)
def test_recipe_fits_its_hardware_and_can_be_trained(
    files: tuple[Path, ...],
    nodes: int,
    hardware: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a cluster with GPUs")
    config = with_folder(files, folders)
    assert not train_refuses(config)
    numbers = [
        3 + 2 * (rank // 8) for rank in range(config.training.layout.world_size)
    ]  # as Ray may give them
    assert engines_over_nodes(config, numbers) == []
    tree = capacity_report(config, load_hardware(hardware)).tree
    assert tree["errors"] == []
    assert tree["fits"]
    assert not any(" free: fragmentation" in line for line in tree["warnings"])
    assert max(each["seconds"] / each["deadline"] for each in tree["step"]["deadlines"]) < 0.5
    assert tree["nodes"] == nodes
    assert tree["world_size"] == 8 * nodes
    assert tree["rollout"]["longest_sequences"] >= 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_plan_says_that_a_recipe_fits_hardware_that_it_does_not(recipe: str) -> None:
    """Of the sizes of memory the smaller one is too small for the largest models, in float8 as well."""
    plan = capacity_report(load([CONFIGS / f"{recipe}.yaml"]), load_hardware("8x80gb"))
    assert plan.fits == (recipe not in ("deepseek_v3", "kimi_k2"))
    assert plan.fits == (not plan.tree["errors"])


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        ("deepseek_v3", "rollout.tp=16"),
        ("qwen3_30b_a3b", "rollout.tp=16"),
        ("qwen3_30b_a3b", "training.layout.tp=128"),
        ("qwen3_30b_a3b", "data.max_prompt_tokens=50000000"),
    ],
)
def test_what_train_refuses_does_not_fit_by_the_plan(
    recipe: str, word: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a cluster with GPUs")
    config = with_folder((CONFIGS / f"{recipe}.yaml",), folders, "training.layout.dp=16", word)
    assert train_refuses(config)
    assert not capacity_report(config, load_hardware("8x141gb")).fits


@pytest.mark.parametrize(("files", "nodes", "hardware"), cases())
def test_a_resolved_recipe_reads_back_the_same(
    files: tuple[Path, ...], nodes: int, hardware: str, tmp_path: Path
) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(load(files)))
    assert dump(load([resolved])) == resolved.read_text()


def test_both_memory_sizes_and_all_scales_are_there() -> None:
    sizes = {(nodes, hardware) for _, nodes, hardware in cases()}
    assert {hardware for _, hardware in sizes} == {"8x80gb", "8x141gb"}
    assert {1, 16} <= {nodes for nodes, _ in sizes}
    assert max(nodes for nodes, _ in sizes) >= 32


def test_the_largest_plan_is_quick() -> None:
    start = time.process_time()
    files = [CONFIGS / "deepseek_v3.yaml", CONFIGS / "layouts" / "deepseek_v3_64x8x141gb.yaml"]
    report = capacity_report(load(files), load_hardware("8x141gb"))
    assert report.tree["world_size"] == 512
    assert time.process_time() - start < 30
