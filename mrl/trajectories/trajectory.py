"""One sample on its way from prompt to verdict: everything that a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from mrl.agents.episode import Episode
from mrl.rollout.request import Completion, completion_of, whole_sample
from mrl.rollout.seeds import request_id
from mrl.samples import Prompt, Sample, Status, Transcript, Verdict

ENGINE, ENVIRONMENT, IN_LINE = "an engine", "its environment", "in line for an environment"
"""What a trajectory waits for."""


@dataclasses.dataclass(slots=True, eq=False)
class Trajectory:
    """A rollout adds to it; nothing of a rollout's state lies elsewhere, so that a checkpoint needs no coroutine."""

    prompt: Prompt
    number: int
    """Number of the sample in its group."""
    sample: Sample | None = None
    """The whole sample, without its verdict; None before its end."""
    verdict: Verdict | None = None
    record: Sample | None = None
    """What an earlier process had of it, as PARKED, until it is that again."""
    episode: Episode | None = None
    """Its turns, if an environment answers."""
    faults: int = 0
    """Times it began anew because something of ours had failed."""
    restarts: int = 0
    """Times it began anew because its environment did not repeat what it had said."""
    waits_for: str = ENGINE

    @property
    def name(self) -> str:
        """Return the sample's id."""
        return request_id(self.prompt.index, self.number)

    @classmethod
    def of(cls, prompt: Prompt, number: int, record: Sample | None = None) -> Trajectory:
        """Return the trajectory of a sample, continuing what `saved` returned of it in an earlier process."""
        if record is None:
            return cls(prompt, number)
        if record.status is Status.PARKED:
            return cls(prompt, number, record=record)
        return cls(prompt, number, sample=dataclasses.replace(record, verdict=None), verdict=record.verdict)

    def so_far(self) -> Completion | None:
        """Return what an earlier process had of a single response; None without any."""
        return None if self.record is None else completion_of(self.record)

    def saved(self, so_far: Completion | None) -> Sample | None:
        """Return what a checkpoint keeps: the sample with its verdict, or as PARKED what has come. None for one that has not
        begun. `so_far`: what engines have of the generation under way."""
        if self.sample is not None:
            return self.sample if self.verdict is None else self.sample.with_verdict(self.verdict)
        if self.episode is None:
            if so_far is None or not len(so_far.tokens):
                return self.record
            parked = dataclasses.replace(so_far, status=Status.PARKED)
            return whole_sample(self.prompt, self.number, parked)
        if self.record is not None:  # it is not yet again what it was
            return self.record
        sample = self.episode_sample(Status.PARKED)
        return sample if so_far is None else _with_tail(sample, so_far)

    def episode_sample(self, status: Status) -> Sample:
        """Return the sample that the episode makes, as it is now."""
        assert self.episode is not None, "only if an environment answers"
        transcript = self.episode.transcript(faults=self.faults, restarts=self.restarts)
        made = self.episode.sample(self.prompt, self.number, status=status, text=_text_of(transcript))
        return dataclasses.replace(made, transcript=transcript)

    def judged(self) -> Sample:
        """Return the sample with its verdict."""
        assert self.sample is not None and self.verdict is not None, f"sample {self.name} is not judged yet"
        return self.sample.with_verdict(self.verdict)


def _with_tail(sample: Sample, so_far: Completion) -> Sample:
    """Return an episode's sample with a turn that was begun."""
    start, count = len(sample.response_tokens), len(so_far.tokens)
    moved = tuple(dataclasses.replace(s, start=s.start + start, end=s.end + start) for s in so_far.segments)
    return dataclasses.replace(
        sample,
        response_tokens=np.concatenate([sample.response_tokens, so_far.tokens]),
        loss_mask=np.concatenate([sample.loss_mask, np.ones(count, np.bool_)]),
        rollout_logprobs=np.concatenate([sample.rollout_logprobs, so_far.logprobs]),
        policy_versions=np.concatenate([sample.policy_versions, so_far.policy_versions]),
        segments=sample.segments + moved,
    )


def _text_of(transcript: Transcript) -> str:
    """Return what was said, one after the other, as a judge reads it."""
    said = (part for turn in transcript.turns for part in (turn.text, turn.observation))
    return "\n".join(part for part in said if part)
