"""Rollout of a single response."""

from __future__ import annotations

from mrl.rollout.engine_pool import Policy
from mrl.rollout.request import GenerationRequest, sample_of_completion
from mrl.trajectories.trajectory import Trajectory


async def single_turn(policy: Policy, trajectory: Trajectory, request: GenerationRequest) -> None:
    """Generate the response to a prompt."""
    completion = await policy.generate(request, trajectory.so_far())
    trajectory.sample = sample_of_completion(trajectory.prompt, trajectory.number, completion)
