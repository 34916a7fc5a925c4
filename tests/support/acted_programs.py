"""Programs with the packages of `make programs`, whose policy says what a script says."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import numpy as np

from mrl.agents.environment_client import EnvironmentClient
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentWorkers
from mrl.gateway.server import Gateway
from mrl.gateway.templates import Templates
from mrl.rollout.request import GenerationRequest
from mrl.samples import Prompt, Sample
from mrl.trajectories.program_rollout import ProgramRules, program_rollout
from mrl.trajectories.trajectory import Trajectory
from tests.support import chat_tokenizers
from tests.support.scripted_policy import ScriptedPolicy
from tests.support.source_tree import ROOT

PYTHON = ".programs/bin/python"
_LIMITS = Limits(max_turns=8, max_context=60000, max_tokens=60000, max_turn_tokens=4000)


def install_programs() -> None:
    """Install the packages of requirements/programs.lock, unless they are there."""
    subprocess.run(["make", "-s", ".programs/installed"], cwd=ROOT, check=True, timeout=1500)


def call(name: str, **arguments: str) -> str:
    """Return a turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sample_of(spec: EnvironmentSpec, content: str, turns: list[str], **row: Any) -> Sample:
    """Return the sample of a program that needs just these turns of the policy."""
    tokenizer, script = chat_tokenizers.qwen(), iter(turns)
    rules = ProgramRules("program", Templates(tokenizer, show_tools="system"), _LIMITS, retries=0)
    messages = ({"role": "user", "content": content},)
    prompt = Prompt(0, np.array([1], np.int32), "?", None, metadata=row, messages=messages)
    trajectory = Trajectory.of(prompt, 0)
    request = GenerationRequest(trajectory.name, prompt.tokens, 0, 1)

    async def roll() -> None:
        with EnvironmentWorkers({"program": spec}, Deadlines(run_seconds=600)) as pool:
            client, policy = EnvironmentClient(pool), ScriptedPolicy(tokenizer, lambda context: next(script))
            await program_rollout(policy, client, Gateway(), rules, trajectory, request, 7)

    asyncio.run(asyncio.wait_for(roll(), 900))
    assert trajectory.sample is not None and trajectory.sample.transcript is not None
    transcript = trajectory.sample.transcript
    assert (transcript.ended_by, transcript.reason) == ("env_done", "") and next(script, None) is None
    return trajectory.sample


def reward_of(sample: Sample) -> float | None:
    """Return the reward on a sample's last turn."""
    assert sample.transcript is not None
    return sample.transcript.turns[-1].reward
