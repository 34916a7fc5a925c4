"""Rollout of a program that calls the policy itself, through the gateway.

A failure that the policy cannot have caused, of an engine, of the program or of its process, restarts the
program, at most `rules.retries` times; then the trajectory has no reward. A resumed run starts programs anew.

A program that ends well without a turn of the policy would do so again, so it is not restarted. If no program
had one before, the programs do not find the policy: that ends the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from mrl.agents.answer import EnvironmentFault, EnvironmentResult
from mrl.agents.environment_client import EnvironmentClient, OpenEnvironment
from mrl.agents.episode import EndedBy, Limits
from mrl.errors import ConfigError
from mrl.gateway.server import Gateway
from mrl.gateway.session import ModelSession
from mrl.gateway.templates import Templates
from mrl.rollout.engine_pool import Policy
from mrl.rollout.request import GenerationRequest
from mrl.rollout.seeds import request_id, seed_of_request
from mrl.samples import Prompt, Sample, Transcript
from mrl.trajectories.trajectory import ENGINE, ENVIRONMENT, IN_LINE, Trajectory

_OWN_FAULTS = (EnvironmentFault.RAISED, EnvironmentFault.EXITED)
"""How a program fails that does not expect a refusal, or a turn that is cut."""
_MAX_REASON = 600


@dataclasses.dataclass(slots=True)
class ProgramRules:
    """Settings that the programs of a domain share, and what is known of them."""

    environment: str
    """Key of the program (`AgentSection.environments`)."""
    templates: Templates
    limits: Limits
    retries: int
    find_policy: bool = False
    """Whether a request of one of them has reached the policy, in this process."""


async def program_rollout(
    policy: Policy,
    environments: EnvironmentClient,
    gateway: Gateway,
    rules: ProgramRules,
    trajectory: Trajectory,
    request: GenerationRequest,
    run_seed: int,
) -> None:
    """Run a program to its end; its conversations become the trajectory's sample.

    Raises:
        ConfigError: Programs do not find the policy.
    """
    trajectory.is_program = True
    attempt = 0

    def on_wait(waits: bool) -> None:
        rules.find_policy = True
        trajectory.waits_for = ENGINE if waits else ENVIRONMENT

    while True:
        session = ModelSession(
            policy,
            rules.templates,
            rules.limits,
            request,
            run_seed=run_seed,
            attempt=attempt,
            on_wait=on_wait,
        )
        trajectory.waits_for = IN_LINE
        async with (
            gateway.opened(session) as model,
            environments.opened(
                (trajectory.prompt.index, trajectory.number),
                f"{trajectory.name}/{trajectory.faults}",
                rules.environment,
                _task_of(trajectory.prompt),
                # All samples of a prompt start from the same seed.
                seed_of_request(run_seed, request_id(trajectory.prompt.index, 0)) & 0x7FFFFFFF,
                model=(model.url, model.key),
            ) as environment,
        ):
            trajectory.waits_for = ENVIRONMENT
            answer = await _result(environment, session)
        attempt = session.attempt
        ended_by, reason = _end(session, answer)
        if _is_silent(session, answer):
            if not rules.find_policy:
                raise ConfigError(
                    f"{rules.environment}: {reason}. No program has had one yet. Programs find the policy by "
                    "OPENAI_BASE_URL or ANTHROPIC_BASE_URL, and its key by OPENAI_API_KEY or "
                    f"ANTHROPIC_API_KEY; make this one use them (prompt {trajectory.prompt.index})"
                )
            break
        if not ended_by.is_infrastructure_failure or trajectory.faults >= rules.retries:
            break
        trajectory.faults += 1
    transcript = Transcript((), ended_by=ended_by.value, reason=reason, faults=trajectory.faults)
    sample = session.conversations.sample(trajectory.prompt, trajectory.number, ended_by.status, transcript)
    trajectory.sample = _rewarded(sample, answer)


def _task_of(prompt: Prompt) -> dict[str, Any]:
    """Return a row's columns, with its prompt: messages, or the text that a model would read."""
    messages = [dict(message) for message in prompt.messages]
    return {"prompt": messages or prompt.text, **prompt.metadata}


async def _result(environment: OpenEnvironment, session: ModelSession) -> EnvironmentResult:
    """Return a program's result. Raise the error that ends the run as soon as the session has it."""
    result, failed = (
        asyncio.ensure_future(environment.opening()),
        asyncio.ensure_future(session.failed.wait()),
    )
    try:
        await asyncio.wait([result, failed], return_when=asyncio.FIRST_COMPLETED)
        if session.failure is not None:
            raise session.failure
        return result.result()
    finally:
        result.cancel()
        failed.cancel()


def _end(session: ModelSession, answer: EnvironmentResult) -> tuple[EndedBy, str]:
    """Return how the trajectory ended, and why.

    A program that raises or exits after the policy met a limit has failed because of it. One that goes on
    with a whole turn has dealt with it."""
    if session.ended_by is not None and (
        session.ended_by.is_infrastructure_failure or answer.fault in (None, *_OWN_FAULTS)
    ):
        return session.ended_by, session.reason
    if answer.fault is not None:
        assert answer.ended_by is not None, "a fault ends the episode"
        return answer.ended_by, answer.reason
    reason = str(answer.info.get("reason", ""))[:_MAX_REASON]
    if _is_silent(session, answer):
        without = "the program ended without an answered request to the model"
        return EndedBy.ENV_CRASHED, f"{without} ({reason})" if reason else without
    return EndedBy.ENV_DONE, reason


def _is_silent(session: ModelSession, answer: EnvironmentResult) -> bool:
    """Return True if a program ended well without a turn of the policy."""
    return answer.fault is None and session.ended_by is None and not session.conversations.turns


def _rewarded(sample: Sample, answer: EnvironmentResult) -> Sample:
    """Return the sample with the program's reward on its last turn."""
    transcript = sample.transcript
    assert transcript is not None, "every conversation has one"
    if not transcript.turns:
        return sample
    last = dataclasses.replace(transcript.turns[-1], reward=answer.reward)
    return dataclasses.replace(
        sample, transcript=dataclasses.replace(transcript, turns=(*transcript.turns[:-1], last))
    )
