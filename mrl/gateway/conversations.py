"""Conversations of one program as a tree of turns, so that every token is rendered once and trained once.

A request whose messages continue an earlier turn keeps that turn's tokens, verbatim: only what is new is
rendered. Any other request (a rewritten or compacted history, a sub-agent) begins a conversation of its own,
rendered whole; what it quotes of the policy is then context. Pure: no input or output, no waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mrl.gateway.histories import ChatMessage, History, following_digest
from mrl.rollout.request import Completion
from mrl.samples import Prompt, ResponseSegment, Sample, Status, Transcript, Turn
from mrl.sampling_masks import SamplingMasks, join_masks

_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PolicyTurn:
    """Turn of the policy in a conversation."""

    parent: PolicyTurn | None
    before: np.ndarray
    """[n] int32: tokens between the parent's last one and this turn; of a first turn, the whole prompt."""
    completion: Completion
    text: str
    observation: str
    """What `before` says, in words."""
    number: int
    """Position among all turns of the program, in order of completion."""

    def path(self) -> list[PolicyTurn]:
        """Return the turns of the conversation up to this one."""
        turns: list[PolicyTurn] = []
        turn: PolicyTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def context(self) -> np.ndarray:
        """Return [T] int32: all tokens up to the turn's last one."""
        return np.concatenate(
            [part for turn in self.path() for part in (turn.before, turn.completion.tokens)]
        )


class Conversations:
    """All conversations of one trajectory's program."""

    def __init__(self) -> None:
        self.turns: list[PolicyTurn] = []
        self._by_history: dict[bytes, PolicyTurn] = {}
        """Turns by the identity of all messages up to their own."""

    def find(self, history: History) -> tuple[PolicyTurn | None, Sequence[ChatMessage]]:
        """Return the turn that a request continues, and the messages after it; (None, all) if there is none.

        Only results of tools, and then other messages that are not the policy's, continue a turn.
        """
        messages = history.messages
        for count in range(len(messages) - 1, 0, -1):
            if (turn := self._by_history.get(history.digests[count])) is not None:
                roles = [message.role for message in messages[count:]]
                if "assistant" in roles or "tool" in roles[roles.count("tool") :]:
                    break
                return turn, messages[count:]
        return None, messages

    def add(
        self,
        parent: PolicyTurn | None,
        before: np.ndarray,
        completion: Completion,
        *,
        history: History,
        reply: ChatMessage,
        text: str,
        observation: str = "",
    ) -> PolicyTurn:
        """Add a turn.

        Args:
            reply: The turn as the client gets it, and will send it back.
            text: The turn's whole text, with its thoughts.
        """
        turn = PolicyTurn(parent, before, completion, text, observation, len(self.turns))
        self.turns.append(turn)
        self._by_history[following_digest(history.digests[-1], reply)] = turn
        return turn

    def sample(self, prompt: Prompt, number: int, status: Status, transcript: Transcript) -> Sample:
        """Return the trajectory's sample: its sequences are the conversations, by their last turns.

        Each turn is trained in the first sequence that has it. `transcript`: without turns.
        """
        parents = {id(turn.parent) for turn in self.turns}
        paths = [turn.path() for turn in self.turns if id(turn) not in parents] or [[]]
        trained = set[int]()
        *branches, main = (_sequence(prompt, number, status, path, trained) for path in paths)
        assert main.transcript is not None, "every sequence has one"
        transcript = dataclasses.replace(
            transcript, turns=main.transcript.turns, opening=main.transcript.opening
        )
        return dataclasses.replace(main, transcript=transcript, branches=tuple(branches))


def _sequence(
    prompt: Prompt, number: int, status: Status, path: Sequence[PolicyTurn], trained: set[int]
) -> Sample:
    """Return a conversation as a sample that trains the turns not yet in `trained`, and add them to it."""
    parts, logprobs, versions, masks, length = [_NOTHING], [_NOTHING], [_NOTHING], [_NOTHING], 0
    segments, turns = list[ResponseSegment](), list[Turn]()
    kept: list[tuple[SamplingMasks | None, int]] = []
    for turn in path:
        observed = turn.before if turn.parent is not None else _NOTHING
        is_new, completion = turn.number not in trained, turn.completion
        trained.add(turn.number)
        start, count = length + len(observed), len(completion.tokens)
        length = start + count
        parts += [observed, completion.tokens]
        logprobs += [np.zeros(len(observed)), completion.logprobs * is_new]
        versions += [np.full(len(observed), -1), completion.policy_versions if is_new else np.full(count, -1)]
        masks += [np.zeros(len(observed)), np.full(count, is_new)]
        kept += [(None, len(observed)), (completion.sampling_masks if is_new else None, count)]
        if turns:
            turns[-1] = dataclasses.replace(turns[-1], observation=turn.observation)
        turns.append(Turn(start, length, turn.text))
        if is_new:
            segments += [
                dataclasses.replace(s, start=s.start + start, end=s.end + start) for s in completion.segments
            ]
    return Sample(
        prompt_index=prompt.index,
        sample_index=number,
        prompt_tokens=path[0].before if path else prompt.tokens,
        response_tokens=np.concatenate(parts).astype(np.int32),
        loss_mask=np.concatenate(masks).astype(np.bool_),
        rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
        policy_versions=np.concatenate(versions).astype(np.int32),
        status=status,
        response_text="\n".join(part for turn in turns for part in (turn.text, turn.observation) if part),
        domain=prompt.domain,
        tag=prompt.tag,
        segments=tuple(segments),
        sampling_masks=join_masks(kept),
        transcript=Transcript(tuple(turns), opening=path[0].observation if path else ""),
    )
