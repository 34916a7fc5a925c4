"""Sample in flight, from prompt to verdict: everything that a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.agents.episode import Episode
from mrl.rollout.request import Completion, completion_of, sample_of_completion
from mrl.rollout.seeds import request_id
from mrl.samples import Prompt, Sample, Status, Transcript, Verdict
from mrl.sampling_masks import join_masks

ENGINE, ENVIRONMENT, IN_LINE = "an engine", "its environment", "in line for an environment"
"""What a trajectory may wait for."""


@dataclasses.dataclass(slots=True, eq=False)
class Trajectory:
    """Sample in flight. It contains all state of its rollout, so that a checkpoint needs no coroutine."""

    prompt: Prompt
    number: int
    """Number of the sample in its group."""
    sample: Sample | None = None
    """The whole sample, without its verdict; None until it ends."""
    verdict: Verdict | None = None
    record: Sample | None = None
    """An earlier process's sample, with status PARKED, until this one has caught up with it."""
    episode: Episode | None = None
    """The turns so far, if there is an environment."""
    faults: int = 0
    """Number of restarts after an infrastructure failure."""
    restarts: int = 0
    """Number of restarts because the environment did not repeat its observations."""
    waits_for: str = ENGINE
    is_program: bool = False
    """A program makes it, which starts anew in a resumed run."""

    @property
    def name(self) -> str:
        """Id of the sample."""
        return request_id(self.prompt.index, self.number)

    @classmethod
    def of(cls, prompt: Prompt, number: int, record: Sample | None = None) -> Trajectory:
        """Return the trajectory of a sample, continuing the `record` that `saved` returned earlier."""
        if record is None:
            return cls(prompt, number)
        if record.status is Status.INTERRUPTED:
            return cls(prompt, number, record=record)
        return cls(prompt, number, sample=dataclasses.replace(record, verdict=None), verdict=record.verdict)

    def so_far(self) -> Completion | None:
        """Return what an earlier process had of a single response, if anything."""
        return None if self.record is None else completion_of(self.record)

    def saved(self, so_far: Completion | None) -> Sample | None:
        """Return what a checkpoint keeps: the sample with its verdict, or the partial rollout as PARKED; None
        if it has not begun. `so_far`: what engines have of the current generation."""
        if self.sample is not None:
            return self.sample if self.verdict is None else self.sample.with_verdict(self.verdict)
        if self.is_program:
            return None
        if self.episode is None:
            if so_far is None or not len(so_far.tokens):
                return self.record
            interrupted = dataclasses.replace(so_far, status=Status.INTERRUPTED)
            return sample_of_completion(self.prompt, self.number, interrupted)
        if self.record is not None:  # it has not caught up yet
            return self.record
        sample = self.episode_sample(Status.INTERRUPTED)
        return sample if so_far is None else _with_tail(sample, so_far)

    def episode_sample(self, status: Status) -> Sample:
        """Return the episode's sample as it is now."""
        assert self.episode is not None, "only with an environment"
        transcript = self.episode.transcript(faults=self.faults, restarts=self.restarts)
        made = self.episode.sample(self.prompt, self.number, status=status, text=_text_of(transcript))
        return dataclasses.replace(made, transcript=transcript)

    def judged(self) -> Sample:
        """Return the sample with its verdict."""
        assert self.sample is not None and self.verdict is not None, f"sample {self.name} is not judged yet"
        return self.sample.with_verdict(self.verdict)


def _with_tail(sample: Sample, so_far: Completion) -> Sample:
    """Append a partial turn to an episode's sample."""
    start, count = len(sample.response_tokens), len(so_far.tokens)
    moved = tuple(dataclasses.replace(s, start=s.start + start, end=s.end + start) for s in so_far.segments)
    return dataclasses.replace(
        sample,
        response_tokens=np.concatenate([sample.response_tokens, so_far.tokens]),
        loss_mask=np.concatenate([sample.loss_mask, np.ones(count, np.bool_)]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, so_far.logprobs]),
        policy_versions=np.concatenate([sample.policy_versions, so_far.policy_versions]),
        segments=sample.segments + moved,
        sampling_masks=join_masks([(sample.sampling_masks, start), (so_far.sampling_masks, count)]),
    )


def _text_of(transcript: Transcript) -> str:
    """Return all turns and observations in order, as a judge reads them."""
    texts = (part for turn in transcript.turns for part in (turn.text, turn.observation))
    return "\n".join(part for part in texts if part)
