"""Rollout of a program that calls the policy itself, through the gateway.

A failure that the policy cannot have caused, of an engine, of the program or of its process, restarts the
program, at most `rules.retries` times; then the trajectory has no reward. A resumed run starts programs anew.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.agents.answer import EnvironmentResult
from mrl.agents.environment_client import EnvironmentClient
from mrl.agents.episode import EndedBy, Limits
from mrl.gateway.server import Gateway
from mrl.gateway.session import ModelSession
from mrl.gateway.templates import Templates
from mrl.rollout.engine_pool import Policy
from mrl.rollout.request import GenerationRequest
from mrl.rollout.seeds import request_id, seed_of_request
from mrl.samples import Prompt, Sample, Transcript
from mrl.trajectories.trajectory import ENGINE, ENVIRONMENT, IN_LINE, Trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramRules:
    """Settings that the programs of a domain share."""

    environment: str
    """Key of the program (`AgentSection.environments`)."""
    templates: Templates
    limits: Limits
    retries: int


async def program_rollout(
    policy: Policy,
    environments: EnvironmentClient,
    gateway: Gateway,
    rules: ProgramRules,
    trajectory: Trajectory,
    request: GenerationRequest,
    run_seed: int,
) -> None:
    """Run a program to its end; its conversations become the trajectory's sample."""
    trajectory.is_program = True
    attempt = 0

    def on_wait(waits: bool) -> None:
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
            answer = await environment.opening()
        if session.failure is not None:
            raise session.failure
        attempt = session.attempt
        ended_by, reason = _end(session, answer)
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


def _end(session: ModelSession, answer: EnvironmentResult) -> tuple[EndedBy, str]:
    """Return how the trajectory ended, and why.

    A program that fails after the policy met a limit has failed because of it. One that goes on after its
    context was full (with a shorter history) has not."""
    limit, has_failed = session.ended_by, answer.fault is not None
    if limit is not None and limit.is_infrastructure_failure:
        return limit, session.reason
    if limit is EndedBy.TURN_LIMIT or (limit is not None and has_failed):
        return limit, session.reason
    if has_failed:
        assert answer.ended_by is not None, "a fault ends the episode"
        return answer.ended_by, answer.reason
    if not session.conversations.turns:
        return EndedBy.ENV_CRASHED, "the program ended without a request to the model"
    return EndedBy.ENV_DONE, ""


def _rewarded(sample: Sample, answer: EnvironmentResult) -> Sample:
    """Return the sample with the program's reward and time on its last turn."""
    transcript = sample.transcript
    assert transcript is not None, "every conversation has one"
    if not transcript.turns:
        return sample
    last = dataclasses.replace(transcript.turns[-1], reward=answer.reward, seconds=answer.seconds)
    return dataclasses.replace(
        sample, transcript=dataclasses.replace(transcript, turns=(*transcript.turns[:-1], last))
    )
