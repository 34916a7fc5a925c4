"""Programs of examples/programs, with their real packages: with scripted turns, random models, and one that
learns."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.agents.environment_registry import EnvironmentSpec
from mrl.observe.metrics_log import read
from mrl.samples import Sample
from tests.launch.command import run
from tests.support import chat_tokenizers
from tests.support.acted_programs import call, install_programs, reward_of, sample_of
from tests.support.once import once
from tests.support.source_tree import ROOT
from tests.tiny_models import write_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAMS = Path("examples/programs")


@pytest.fixture(scope="session", autouse=True)
def packages() -> None:
    install_programs()


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths of configurations are relative, and nothing is downloaded."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def acted(name: str, content: str, turns: list[str], **row: Any) -> Sample:
    """Return the sample of an example's program whose policy says these turns."""
    section = yaml.safe_load((ROOT / PROGRAMS / f"{name}.yaml").read_text())["agent"]
    spec = EnvironmentSpec(section["environment"], section.get("options", {}), section["python"])
    return sample_of(spec, content, turns, **row)


def test_an_agent_of_openais_sdk_calls_its_tool() -> None:
    sample = acted(
        "openai_agents", "37*58", [call("calculator", expression="37*58"), "2146"], expression="37*58"
    )
    assert sample.transcript is not None and sample.transcript.turns[0].observation == "2146"
    assert reward_of(sample) == 1.0 and not sample.branches


def test_a_tools_error_is_shown_to_the_policy() -> None:
    turns = [call("calculator", expression="__import__('os')"), "2145"]
    sample = acted("openai_agents", "37*58", turns, expression="37*58")
    assert sample.transcript is not None and "An error occurred" in sample.transcript.turns[0].observation
    assert reward_of(sample) == 0.0


def test_a_code_agents_program_is_run() -> None:
    """smolagents adds to the policy's turns, so that each step is a conversation."""
    turns = ["I multiply.\n<code>\nx = 6 * 7\nprint(x)\n</code>", "<code>\nfinal_answer(x)\n</code>"]
    sample = acted("code_agent", "6*7?", turns, answer="42")
    assert reward_of(sample) == 1.0 and len(sample.branches) == 1


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_repository_is_repaired_by_commands_in_a_sandbox(is_fixed: bool, tmp_path: Path) -> None:
    """A command reaches no file of the machine, does not know the policy's key, and leaves no process."""
    row = json.loads((ROOT / PROGRAMS / "repairs/tasks.jsonl").read_text().splitlines()[0])
    patch = (ROOT / PROGRAMS / "repairs" / row["repository"] / "fix.patch").read_text()
    turns = [
        call("bash", command="ls"),
        call("bash", command=f"touch {tmp_path}/file; env; sleep 600 &"),
        call("bash", command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '"),
        call("bash", command=f"patch -p1 <<'EOF'\n{patch}EOF\n" if is_fixed else "cat cache/store.py"),
        call("bash", command="python3 -m unittest tests/test_cache.py"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    sample = acted("mini_swe_agent", row["prompt"][0]["content"], turns, repository=row["repository"])
    assert sample.transcript is not None and not sample.branches
    observations = [turn.observation for turn in sample.transcript.turns]
    assert "tests" in observations[0] and "Ran 3 tests" in observations[4]
    assert not list(tmp_path.iterdir()) and "No such file" in observations[1]
    assert "HOME=/tmp" in observations[1] and "API_KEY" not in observations[1]
    assert "cat /proc" in observations[2] and "sleep 600" not in observations[2]
    assert reward_of(sample) == float(is_fixed)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model that reads long prompts; a third of its tokens end a turn."""

    def make(folder: Path) -> None:
        tokenizer = chat_tokenizers.qwen()
        vocabulary = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        write_model(folder, served=True, max_position_embeddings=16384, **vocabulary)
        tokenizer.save_pretrained(str(folder))
        ends = json.dumps({"eos_token_id": list(range(0, 360, 3))})
        (folder / "generation_config.json").write_text(ends)

    return once(tmp_path_factory, "long_model", make)


@pytest.mark.parametrize(
    ("name", "conversations"), [("openai_agents", 1), ("code_agent", 5), ("mini_swe_agent", 3)]
)
def test_a_program_runs_to_its_end_on_an_engine(
    name: str, conversations: int, random_model: Path, tmp_path: Path
) -> None:
    """A difference between generated and trained tokens, or in a log-prob, ends the run."""
    products = [
        {"prompt": [{"role": "user", "content": f"6*{n}"}], "expression": f"6*{n}", "answer": str(6 * n)}
        for n in range(1, 5)
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in products))
    if name == "mini_swe_agent":
        shutil.copy(ROOT / PROGRAMS / "repairs/tasks.jsonl", rows)
    args = [
        "configs/quickstart.yaml",
        str(PROGRAMS / f"{name}.yaml"),
        f"run={{name: run, folder: {tmp_path}}}",
        f"model={{path: {random_model}, max_length: 12288}}",
        f"data={{train: {rows}, validation: null, max_prompt_tokens: 512}}",
        "agent={show_tools: system, max_turn_tokens: 24, run_seconds: 900}",
        "reward={kind: environment}",
        "rollout={max_response_tokens: 4096}",
        "training={layout: {ep: 1, dp: 1}, optimizer: {lr: 1e-3}, microbatch_tokens: 8192}",
        "loop={steps: 2, prompts_per_step: 1, samples_per_prompt: 2, max_rollout_mismatch: 1e-4}",
        "loop.validation={every_steps: 0, before_training: false}",
        "loop.checkpoint={every_steps: 0}",
    ]
    run("train", *args, log=tmp_path / "run.log", seconds=1500)
    steps = [row for row in read(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert len(steps) == 2
    for step in steps:
        assert step["agent/episodes"] == 2 and step["reward/no_reward_frac"] == step["agent/retries"] == 0
        assert step["agent/conversations"] == conversations and step["agent/turns"] >= conversations
        assert step.get("policy/rollout_logprob_diff_max", 0.0) < 1e-4


@pytest.fixture(scope="session")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of `make calculator` before RL."""

    def make(folder: Path) -> None:
        subprocess.run(["make", "-s", "work/calculator/sft/config.json"], cwd=ROOT, check=True, timeout=1500)
        shutil.copytree(ROOT / "work/calculator", folder, dirs_exist_ok=True)

    return once(tmp_path_factory, "calculator", make)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_unchanged_program_learns(seed: int, calculator: Path, tmp_path: Path) -> None:
    """Calls of the SDK's tool raise the rate of correct products by 0.3 in ten steps."""
    args = [
        "configs/calculator.yaml",
        str(PROGRAMS / "openai_agents.yaml"),
        f"run={{name: run, folder: {tmp_path}, seed: {seed}}}",
        f"model.path={calculator}/sft",
        f"data={{train: {calculator}/train.jsonl, validation: {calculator}/validation.jsonl}}",
    ]
    run("train", *args, log=tmp_path / "run.log", seconds=1500)
    rates = [row["val/reward"] for row in read(tmp_path / "run/metrics.jsonl") if "val/reward" in row]
    assert len(rates) == 2 and rates[1] >= rates[0] + 0.3, rates
