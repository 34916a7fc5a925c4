"""The guides say what the code has: every class, name, setting and command, no more and no fewer."""

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import mrl
from mrl import errors
from mrl.algorithms.losses import Tokens, loss_of
from mrl.algorithms.tokens import Segments
from mrl.config.describe import settings
from mrl.config.load import load_config
from mrl.config.other_names import SYNONYMS
from mrl.config.sections.policy_loss import CustomLoss
from mrl.pages import PAGES
from tests.support.source_tree import ROOT

COMMANDS = re.compile(r"^mrl (?:train|eval|plan) (configs/.+?)(?:  .*| --.*)?$", re.M)
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md"))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def first_column(text: str) -> list[str]:
    """The quoted names that rows of tables begin with."""
    return re.findall(r"^\| `([^`]+)`", text, re.M)


def under(heading: str, text: str) -> str:
    return text.partition(f"## {heading}")[2].partition("\n## ")[0]


def test_every_error_class_is_explained_once() -> None:
    classes = [n for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.MrlError)]
    explained = first_column(page("failures.md").partition("\n## ")[0])
    assert sorted(explained) == sorted(set(classes) - {"MrlError"})
    assert set(classes) <= set(dir(mrl)) and mrl.WorkerLost is errors.WorkerLost


def test_what_the_guide_to_failures_looks_at_is_a_metric() -> None:
    known = PAGES["metrics.md"]()
    named = first_column(under("When training goes wrong", page("failures.md")))
    assert named and not [name for name in named if f"/{name.rpartition('/')[2]}`" not in known]


def test_settings_that_others_words_are_moved_to_exist() -> None:
    known = {re.sub(r"\[.*?\]", "", setting.path) for setting in settings()}
    named = set(first_column(page("moving.md")))
    assert len(named) > 40 and not named - known


def test_every_setting_that_answers_a_word_of_others_has_its_row() -> None:
    """Save vLLM's own words, which are ours too."""
    named = first_column(page("moving.md"))
    answers = {answer.partition(" ")[0].partition("=")[0] for answer in SYNONYMS.values()}
    missing = [a for a in answers if not a.startswith("rollout.") and not any(a.startswith(n) for n in named)]
    assert not missing


def choices(path: str) -> set[str]:
    """What a setting may be: the names in brackets behind it, or those of its type."""
    bracketed = {
        setting.path[len(path) + 1 : -1]
        for setting in settings()
        if re.fullmatch(rf"{path}\[\w+\]", setting.path)
    }
    forms = [setting.form for setting in settings() if setting.path == path]
    return bracketed or set(forms[0].removeprefix(": ").partition(" = ")[0].split(" | "))


@pytest.mark.parametrize(
    ("heading", "path"),
    [
        ("Advantages", "algorithm.estimator.name"),
        ("Policy losses", "algorithm.loss"),
        ("Tokens to one number", "algorithm.aggregation.mode"),
        ("Trainer against engine", "algorithm.correction"),
    ],
)
def test_algorithms_are_those_of_the_code(heading: str, path: str) -> None:
    assert set(first_column(under(heading, page("algorithms.md")))) == choices(path)


def test_every_recipe_of_a_paper_is_listed() -> None:
    listed = re.findall(r"configs/algorithm/(\w+)\.yaml", under("Recipes of papers", page("algorithms.md")))
    there = [path.stem for path in (ROOT / "configs/algorithm").glob("*.yaml")]
    assert set(listed) == set(there)


def test_the_loss_of_ones_own_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", page("algorithms.md"), re.S)[-1]
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    section = CustomLoss(function="my_loss.py:damped", options={"factor": 1.0})
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(
        segments=Segments.of(np.array([2])), mask=torch.tensor([True, True]), num_tokens=2.0, num_sequences=1.0,
        logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=torch.tensor([1.0, -3.0]),
    )  # fmt: skip
    loss_of(section)(tokens).loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 3.0]


JOB_FIELDS = {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
GROUP_FIELDS = {"labels", "resources", "rayStartParams", "template"}
WORKER_FIELDS = GROUP_FIELDS | {"groupName", "replicas", "minReplicas", "maxReplicas"}
"""Of KubeRay's API (ray.io/v1: RayJobSpec, RayClusterSpec, HeadGroupSpec, WorkerGroupSpec), those that the manifest has."""


def test_the_job_for_kubernetes_fits_its_configuration_and_ray() -> None:
    job = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (set(spec), set(cluster), set(head)) == (JOB_FIELDS, CLUSTER_FIELDS, GROUP_FIELDS)
    assert all(set(worker) == WORKER_FIELDS and worker["replicas"] == 1 for worker in workers)
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "pyproject.toml").read_text()
    groups = [head, *workers]
    assert [group["labels"] for group in groups] == [{"mrl-node": str(n)} for n in range(len(groups))]
    _, _, script = shlex.split(spec["entrypoint"])
    preflight, train = (part.split() for part in re.findall(r"(?:preflight|train) ([^&]+)", script))
    assert preflight[-2:] == ["--nodes", str(len(groups))]
    config = load_config(*train)
    assert config.num_slots == load_config(*preflight[:-2]).num_slots
    assert config.num_slots == sum(int(group["resources"]["slot"]) for group in groups)
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == group["resources"]["GPU"]
        assert group["resources"]["GPU"] == group["resources"]["slot"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/dev/shm", "/runs"} == mounted


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_command_of_a_guide_is_a_configuration(path: Path) -> None:
    for words in COMMANDS.findall(path.read_text()):
        if "..." not in words:
            load_config(*shlex.split(words))


def test_the_environment_of_ones_own_answers() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page("environments.md"), re.S)[0], names)
    lock = names["Lock"]()
    assert lock.reset({"secret": "271"}, 0) == "Open the lock: three digits."
    said = [lock.step(guess, ()) for guess in ("171", "271")]
    assert [(step.observation, step.reward, step.done) for step in said] == [
        ("2 right", 0.0, False),
        ("3 right", 1.0, True),
    ]
