"""Programs in processes of their own, with the gateway: rewards, limits, failures and who is to blame."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.agents.environment_client import EnvironmentClient
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentWorkers
from mrl.errors import ConfigError
from mrl.gateway.server import Gateway
from mrl.gateway.templates import Templates
from mrl.rewards.kinds.environment_return import return_of
from mrl.rollout.request import Completion, GenerationRequest
from mrl.samples import Prompt, Sample, Status
from mrl.trajectories.program_rollout import ProgramRules, program_rollout
from mrl.trajectories.trajectory import Trajectory
from tests.support import chat_tokenizers, model_programs
from tests.support.scripted_policy import ScriptedPolicy

LIMITS = Limits(max_turns=4, max_context=1500, max_tokens=1500, max_turn_tokens=50)


class LosingPolicy(ScriptedPolicy):
    """Fails as an engine does, at first."""

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        completion = await super().generate(request, so_far)
        if len(self.requests) == 1:
            return Completion.empty(request.request_id, Status.FAILED)
        return completion


def rolled_out(
    does: str,
    tmp_path: Path,
    *,
    kind: type[ScriptedPolicy] = ScriptedPolicy,
    retries: int = 1,
    rules: ProgramRules | None = None,
    **task: Any,
) -> tuple[Trajectory, Sample, ScriptedPolicy, list[str]]:
    """Run a program to its end; return also the policy and what each of its runs did."""
    counts, tokenizer = tmp_path / "counts", chat_tokenizers.qwen()
    numbers = iter(range(100))
    policy = kind(tokenizer, lambda context: "long " * 99 if "ramble" in context else f"turn {next(numbers)}")
    rules = rules or ProgramRules("programs", Templates(tokenizer), LIMITS, retries)
    prompt = Prompt(5, np.array([1], np.int32), "?", None, metadata={"does": does, **task})
    trajectory = Trajectory.of(prompt, 0)
    request = GenerationRequest(trajectory.name, prompt.tokens, 0, 1)
    spec = EnvironmentSpec(f"{model_programs.FILE}Worker", {"counts": str(counts)})

    async def roll() -> None:
        with EnvironmentWorkers({"programs": spec}, Deadlines(run_seconds=task.get("seconds", 60))) as pool:
            client = EnvironmentClient(pool)
            await program_rollout(policy, client, Gateway(), rules, trajectory, request, 7)

    asyncio.run(asyncio.wait_for(roll(), 120))
    assert trajectory.sample is not None and trajectory.saved(None) is trajectory.sample
    return trajectory, trajectory.sample, policy, counts.read_text().splitlines()


def end_of(sample: Sample) -> tuple[str, str]:
    assert sample.transcript is not None
    return sample.transcript.ended_by, sample.transcript.reason


def test_a_program_describes_itself() -> None:
    specs = {
        "programs": EnvironmentSpec(f"{model_programs.FILE}Worker"),
        "calculator": EnvironmentSpec("calculator"),
    }
    with EnvironmentWorkers(specs) as pool:
        assert pool.describe("programs").runs and not pool.describe("calculator").runs


def test_a_program_is_scored_by_what_it_returns(tmp_path: Path) -> None:
    _, sample, policy, runs = rolled_out("scores", tmp_path)
    assert (end_of(sample), sample.status, runs) == (("env_done", ""), Status.FINISHED, ["scores"])
    assert not sample.branches and sample.num_policy_tokens == sample.loss_mask.sum()
    verdict = return_of(sample)
    assert verdict is not None and verdict.value == 0.75
    assert [segment.attempt for segment in sample.segments] == [0, 1]
    assert len({request.seed for request in policy.requests}) == 2


def test_every_conversation_is_trained(tmp_path: Path) -> None:
    _, sample, policy, _ = rolled_out("compacts", tmp_path)
    assert [len(sequence.segments) for sequence in sample.sequences] == [2, 1]
    counts = [sum(s.end - s.start for s in sequence.segments) for sequence in sample.sequences]
    assert sample.num_policy_tokens == sum(counts) and len(policy.requests) == 3
    assert "summary: turn 0; turn 1" in policy._tokenizer.decode(sample.prompt_tokens.tolist())


def test_programs_of_any_language_find_the_policy(tmp_path: Path) -> None:
    _, sample, _, _ = rolled_out("starts_another", tmp_path)
    verdict = return_of(sample)
    assert verdict is not None and verdict.value == 1.0


def test_rewards_may_come_from_elsewhere(tmp_path: Path) -> None:
    _, sample, _, _ = rolled_out("judged", tmp_path)
    assert sample.response_text == "turn 0" and end_of(sample)[0] == "env_done"
    assert sample.transcript is not None and sample.transcript.turns[-1].reward is None


@pytest.mark.parametrize(
    ("does", "ended_by", "reason"),
    [
        ("raises", "env_crashed", "ValueError: a mistake of the program"),
        ("dies", "env_crashed", "status 3"),
        ("hangs", "env_deadline", "agent.run_seconds"),
    ],
)
def test_what_is_not_the_policys_fault_is_tried_again_and_never_scored(
    does: str, ended_by: str, reason: str, tmp_path: Path
) -> None:
    trajectory, sample, _, runs = rolled_out(does, tmp_path, seconds=3 if does == "hangs" else 60)
    assert (end_of(sample)[0], sample.status, runs) == (ended_by, Status.FAILED, [does] * 2)
    assert reason in end_of(sample)[1] and trajectory.faults == 1 and not sample.has_reward


def test_programs_that_do_not_find_the_policy_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"programs: the program ended without .* OPENAI_BASE_URL"):
        rolled_out("says_nothing", tmp_path)
    assert (tmp_path / "counts").read_text() == "says_nothing\n", "it was started again"


def test_one_program_without_a_turn_has_no_reward_and_is_not_tried_again(tmp_path: Path) -> None:
    rules = ProgramRules("programs", Templates(chat_tokenizers.qwen()), LIMITS, retries=1)
    rolled_out("scores", tmp_path, rules=rules)
    trajectory, sample, _, runs = rolled_out("says_nothing", tmp_path, rules=rules)
    assert (end_of(sample)[0], sample.status, runs) == (
        "env_crashed",
        Status.FAILED,
        ["scores", "says_nothing"],
    )
    assert trajectory.faults == 0 and not sample.has_reward


def test_a_second_try_counts(tmp_path: Path) -> None:
    _, sample, _, runs = rolled_out("fails_at_first", tmp_path)
    assert len(runs) == 2 and sample.status is Status.FINISHED
    assert [segment.attempt for segment in sample.segments] == [1], "the first attempt's tokens are gone"


def test_a_lost_engine_is_our_failure(tmp_path: Path) -> None:
    _, sample, _, runs = rolled_out("scores", tmp_path, kind=LosingPolicy)
    assert len(runs) == 2 and sample.status is Status.FINISHED
    _, sample, _, runs = rolled_out("scores", tmp_path, kind=LosingPolicy, retries=0)
    assert (end_of(sample)[0], sample.status) == ("engine_lost", Status.FAILED)


def test_a_program_that_meets_the_policys_limits(tmp_path: Path) -> None:
    """A turn too many, or a context too long that it cannot shorten, is the policy's end: 0, not a fault."""
    _, sample, _, runs = rolled_out("talks", tmp_path)
    assert (end_of(sample)[0], sample.status, len(runs)) == ("turn_limit", Status.TRUNCATED, 1)
    assert len(sample.sequences) == LIMITS.max_turns
    _, sample, _, runs = rolled_out("fills", tmp_path, gives_up=True)
    assert (end_of(sample)[0], sample.status) == ("context_limit", Status.TRUNCATED)
    verdict = return_of(sample)
    assert verdict is not None and verdict.value == 0.0
    _, sample, _, _ = rolled_out("rambles", tmp_path)
    assert (end_of(sample)[0], sample.status) == ("token_limit", Status.TRUNCATED)
    _, sample, _, runs = rolled_out("fills_and_loses_a_service", tmp_path)
    assert (end_of(sample)[0], sample.status, runs[-2:]) == (
        "env_unreachable",
        Status.FAILED,
        ["fills_and_loses_a_service"] * 2,
    )
    _, sample, _, _ = rolled_out("fills", tmp_path, gives_up=False)
    verdict = return_of(sample)
    assert (end_of(sample)[0], sample.status) == ("env_done", Status.FINISHED)
    assert verdict is not None and verdict.value == 0.25
