"""The guides' commands, configurations and code work."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mrl.algorithms.advantages import try_estimator
from mrl.algorithms.losses import Tokens, loss_of
from mrl.algorithms.tokens import Segments
from mrl.config.load import load_config
from mrl.config.sections.algorithm import EstimatorSection
from mrl.config.sections.policy_loss import CustomLoss
from tests.support.source_tree import ROOT

COMMANDS = re.compile(r"^mrl (?:train|eval|plan) (configs/.+?)(?:  .*| --.*)?$", re.M)
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md"))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the page's Python files into the current folder, under the names in their first lines."""
    for code in re.findall(r"```python\n(# (\w+\.py).*?)```", page("algorithms.md"), re.S):
        (tmp_path / code[1]).write_text(code[0])
    monkeypatch.chdir(tmp_path)


def test_the_estimator_of_ones_own_passes_its_trial(own_code: None) -> None:
    section = EstimatorSection(name="custom", function="my_estimator.py:best_of_group")
    try_estimator(section)


def test_the_loss_of_ones_own_computes(own_code: None) -> None:
    section = CustomLoss(function="my_loss.py:damped", options={"factor": 1.0})
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(
        segments=Segments.of(np.array([2])), mask=torch.tensor([True, True]), num_tokens=2.0,
        num_sequences=1.0, logprobs=logprobs, old_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, -3.0]),
    )  # fmt: skip
    loss_of(section)(tokens).loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 3.0]


JOB_FIELDS = {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
GROUP_FIELDS = {"labels", "resources", "rayStartParams", "template"}
WORKER_FIELDS = GROUP_FIELDS | {"groupName", "replicas", "minReplicas", "maxReplicas"}
"""Fields of KubeRay's API (ray.io/v1: RayJobSpec, RayClusterSpec, group specs) that the manifest uses."""


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


def test_the_configuration_of_the_readme_fills_eight_gpus() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    config = load_config(yaml.safe_load(text))
    assert (config.num_slots, config.num_engines) == (8, 4)


def test_the_environment_of_ones_own_answers() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page("environments.md"), re.S)[0], names)
    lock = names["Lock"]()
    assert lock.reset({"secret": "271"}, 0) == "Open the lock: three digits."
    steps = [lock.step(guess, ()) for guess in ("171", "271")]
    assert [(step.observation, step.reward, step.done) for step in steps] == [
        ("2 right", 0.0, False),
        ("3 right", 1.0, True),
    ]
